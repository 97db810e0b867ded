"""Reads the step of a launched run as keys of a workload file and options of the simulator. What no launch tells is
assumed, and said.

Invariant (tests/unit/simulate/test_asked_step.py): the workload, written as verl's overrides, has the run's values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.check import MODE, refusals, to_paste, with_preset, wrong_preset
from verl_fuse.cli.cluster_argument import read_cluster
from verl_fuse.cli.launch import read_run
from verl_fuse.errors import FuseError, listed
from verl_fuse.feature import Feature
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.start.settings import barring, foreseen
from verl_fuse.plan.overrides import KL_KEYS, REWARD_BLOCK, workload_overrides
from verl_fuse.spec.block import nearest, quoted
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    FSDP_BLOCKS,
    MODEL,
    REFERENCE,
    ROLLOUT,
    Get,
    getter,
    has_adapters,
    has_critic,
    has_few_zeros,
    has_reference,
    is_count,
    recomputes,
    sequence_ranks,
)
from verl_fuse.spec.model_names import MODEL_NAMES, model_of_path, parts_of_name
from verl_fuse.spec.workload import Workload

# Prefix of a key of the workload on the command line.
STEP = "step."
# By kind of tokens: the spread of the logarithm of their number.
SPREADS = {"prompt": 0.5, "response": 0.8}
# Share of samples of groups with equal rewards: the lower end of what is common (verl_fuse/simulate/README.md).
ZERO_GRADIENT = 0.2
# Keys of the workload that no launch tells, or only by a model's path.
NOT_TOLD = ("actor", "critic", "reference", "reward", "prompt", "response", "zero_gradient")
# The families whose models stand in for those of others, of the same size.
ALIKE = ("qwen2.5", "qwen3", "llama-3.1")
# Sizes of a layout, by their keys of Megatron.
_LAYOUT = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model"}
# The median is this part of the limit.
PART = 4
_OPTIONS = {
    "max_num_seqs": f"{ROLLOUT}.max_num_seqs",
    "max_num_batched_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "rollout_memory": f"{ROLLOUT}.gpu_memory_utilization",
    "rollout_tp": f"{ROLLOUT}.tensor_model_parallel_size",
}


@dataclass(frozen=True)
class AskedStep:
    """The step to simulate. `config` is verl's configuration as far as it is known. Of a launched run: `options` are
    the simulator's that it tells, `assumed` the keys of the workload that it does not tell, `chosen` the features that
    `preset` switches on."""

    workload: Workload
    cluster: Cluster
    config: DictConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    preset: str = ""
    chosen: tuple[Feature, ...] = ()
    # What was made of arguments that a script does not tell whole, or that Hydra refuses.
    notes: tuple[str, ...] = ()
    # The arguments that switch the preset on.
    paste: tuple[str, ...] = ()
    # What keeps the run from starting, and what of it the simulated step has not.
    problems: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()


def asked_step(words: Sequence[str], script: Path | None, given: Mapping[str, Any]) -> AskedStep:
    """Read the step that a command names by WORKLOAD.yaml and CLUSTER, or by CLUSTER with a script or arguments of
    main_ppo; `given` are keys of the workload that take the place of its own."""
    if script is None and not any("=" in word for word in words[1:]):
        if len(words) != 2:
            raise FuseError(
                "needs WORKLOAD.yaml and CLUSTER, or CLUSTER with --script FILE or -- ARGUMENTS, or --from RUN_DIR"
            )
        if Path(words[0]).suffix == ".sh":
            raise FuseError(f"{words[0]} is a script: simulate {words[1]} --script {words[0]}")
        workload, cluster = Workload.read(Path(words[0]), given), read_cluster(words[1])
        return AskedStep(workload, cluster, config_of(workload, cluster))
    if not words or "=" in words[0]:
        raise FuseError("needs CLUSTER first, which names the kind of device, such as h100")
    require_version()
    cluster, run = read_cluster(words[0]), read_run(words[1:], script)
    if other := [key for key in given if key not in NOT_TOLD]:
        near = nearest(other[0], NOT_TOLD)
        allowed = f"of a launched run allowed: {', '.join(NOT_TOLD)}; any other is changed in its arguments"
        raise FuseError(f"--set {STEP}{other[0]}{near}: {allowed}")
    if wrong := wrong_preset(run.config):
        raise FuseError(*(f"{override}: {why}" for override, why in wrong.items()))
    preset = with_preset(run)
    mode = OmegaConf.select(run.config, MODE)
    if mode != TRAINER_MODE:
        raise FuseError(f"{MODE}={quoted(mode)}: a step of it is not simulated; needs sync, or {TRAINER_MODE}")
    if barred := barring(run.config):
        raise FuseError(f"nothing of verl-fuse fits this run: {listed(barred)}")
    told, assumed = launched_step(run.config, given)
    options = _options(getter(run.config))
    return AskedStep(
        Workload.from_dict(told),
        devices_of(run.config, cluster),
        run.config,
        options,
        assumed,
        preset,
        tuple(choice.feature for choice in foreseen(run.config, preset) if not choice.reasons),
        (
            *run.notes,
            *(f"{override}: left out: {why}" for override, why in run.faulty.items()),
            *([f"left out, not in verl's YAML: {', '.join(run.unknown)}"] if run.unknown else []),
            *(f"the script does not tell {name}: {', '.join(keys)}" for name, keys in (run.unset or {}).items()),
        ),
        tuple(to_paste(run, preset, words[1:] if script is not None else ())),
        tuple(refusals(run)),
        tuple(_not_modelled(getter(run.config), options)),
    )


def _not_modelled(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a run its simulated step has not."""
    yield "micro-batches are the fastest that fit, not the run's"
    if has_adapters(get):
        yield "adapters (LoRA) are simulated as the training of all weights"
    if (strategy := get(f"{ACTOR}.strategy")) not in ("fsdp", "fsdp2", "megatron"):
        yield f"{ACTOR}.strategy={quoted(strategy)} is simulated as fsdp"
    if "rollout_tp" not in options:
        yield f"{ROLLOUT}.tensor_model_parallel_size: the fastest of 1, 2, 4, 8 within a node is simulated"
    devices = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    for role in (ACTOR, *([CRITIC] if has_critic(get) else []), *([REFERENCE] if has_reference(get) else [])):
        block = f"{role}.{'megatron' if get(f'{role}.strategy') == 'megatron' else FSDP_BLOCKS[role]}"
        sizes = {name: get(f"{block}.{kind}_parallel_size") for name, kind in _LAYOUT.items()}
        shards = get(f"{block}.fsdp_size")
        sizes |= {"cp": sequence_ranks(get, role), "fsdp_size=": 1 if shards in (-1, devices) else shards}
        if parts := [f"{name}{size}" for name, size in sizes.items() if size not in (None, 1)]:
            yield f"layouts of training are the fastest that fit, not the run's {' '.join(parts)} of {role}"
        for key in (f"{block}.{kind}_offload" for kind in ("param", "optimizer")):
            if get(key):
                yield f"{key}=true is not simulated"
    if get(f"{REWARD_BLOCK}.enable") and get(f"{REWARD_BLOCK}.enable_resource_pool"):
        yield f"{REWARD_BLOCK}.enable_resource_pool=true: its devices are not simulated"
    if get("algorithm.filter_groups.enable"):
        yield "algorithm.filter_groups: groups that are discarded are not simulated"
    for key in ("data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"):
        if (get(f"{ROLLOUT}.{key}") or 1) > 1:
            yield f"{ROLLOUT}.{key}={get(f'{ROLLOUT}.{key}')} is not simulated"


def launched_step(config: DictConfig, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the keys of a workload file of a run's configuration, those of them that it does not tell, as assumed);
    `given` are keys that take the place of the run's. A FuseError names a value that cannot be read."""
    get = getter(config)
    critic = has_critic(get)
    prompts, size = (_count(get, key) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
    # Whatever the metric of filtered groups, rewards that it tells apart hardly ever are equal.
    few = has_few_zeros(get) or get("algorithm.filter_groups.enable")
    assumed: dict[str, Any] = {} if few else {"zero_gradient": ZERO_GRADIENT}
    minibatches = -(-prompts // size)
    while prompts % minibatches:
        # verl pads the last one; the simulator's are equal.
        assumed["minibatches"] = minibatches = minibatches + 1
    for kind, sigma in SPREADS.items():
        limit = _count(get, f"data.max_{kind}_length")
        assumed[kind] = f"lognormal:median={max(1, limit // PART)},sigma={sigma},max={limit}"
    found: dict[str, Any] = {
        "algorithm": "ppo" if critic else "grpo",
        "prompts": prompts,
        "samples": _count(get, f"{ROLLOUT}.n"),
        "minibatches": minibatches,
        "epochs": _count(get, f"{ACTOR}.ppo_epochs"),
        "old_log_prob": not get("algorithm.rollout_correction.bypass_mode"),
        "kl": next((kl for kl, key in KL_KEYS.items() if get(key)), None),
        **assumed,
        "actor": given.get("actor") or _named(get, f"{MODEL}.path", "actor", assumed),
    }
    found |= {"reference": found["actor"]} if has_reference(get) else {}
    if critic:
        known = model_of_path(get("critic.model.path"))
        found["critic"] = known or found["actor"]
        assumed |= {} if known else {"critic": found["actor"]}
    if get(f"{REWARD_BLOCK}.enable"):
        found["reward"] = given.get("reward") or _named(get, f"{REWARD_BLOCK}.model_path", "reward", assumed)
    return {**found, **given}, {key: text for key, text in assumed.items() if key not in given}


def _options(get: Get) -> dict[str, Any]:
    options = {name: get(key) for name, key in _OPTIONS.items() if get(key) is not None}
    if options.get("rollout_tp") not in (1, 2, 4, 8) or (get("trainer.n_gpus_per_node") or 1) % options["rollout_tp"]:
        options.pop("rollout_tp", None)
    strategy = get(f"{ACTOR}.strategy")
    return {
        **options,
        "padded": not get(f"{MODEL}.use_remove_padding"),
        "engine": "megatron" if strategy == "megatron" else "fsdp",
        "recompute": recomputes(get),
    }


def devices_of(config: DictConfig, cluster: Cluster) -> Cluster:
    """Return the cluster with as many nodes and devices as the run has."""
    get = getter(config)
    nodes, each = (_count(get, f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    if cluster.nodes not in (1, nodes):
        raise FuseError(f"CLUSTER has {cluster.nodes} nodes, and trainer.nnodes={nodes}: name the kind of device alone")
    return replace(cluster, nodes=nodes, devices_per_node=each)


def config_of(workload: Workload, cluster: Cluster) -> DictConfig:
    """Return verl's configuration as far as a workload and a cluster tell it."""
    config = OmegaConf.create()
    devices = {"trainer.nnodes": cluster.nodes, "trainer.n_gpus_per_node": cluster.devices_per_node}
    for key, value in {**workload_overrides(workload), **devices}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def _named(get: Get, key: str, role: str, assumed: dict[str, Any]) -> str:
    """Return the model that a key's path names; of another family one of the same size, which is `assumed`."""
    if (name := model_of_path(get(key))) is not None:
        return name
    alike = [f"{family}-{size}" for family in ALIKE for size in parts_of_name(get(key))]
    found = next((name for name in alike if name in MODEL_NAMES), None)
    if found is None:
        raise FuseError(
            f"{key}={quoted(get(key))}: neither a folder with a config.json, nor has its name a size; needs --set "
            f"{STEP}{role}=PATH of a config.json, or a size such as qwen2.5-7b"
        )
    assumed[role] = found
    return found


def _count(get: Get, key: str) -> int:
    value = get(key)
    if not is_count(value) or isinstance(value, bool):
        raise FuseError(f"{key}={quoted(value)}: needs a whole number >= 1")
    return value
