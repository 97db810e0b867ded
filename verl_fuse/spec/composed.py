"""Reads the composed configuration of a run, verl's with the block `fuse`, and finds the keys that cannot run.

Invariant (tests/unit/spec/test_composed.py): a key that is not there is read as None, and no key is ever written.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeGuard

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_fuse.spec.block import written
from verl_fuse.spec.step import Refusal

# The blocks of a run's models and of its rollout.
ACTOR, REFERENCE, ROLLOUT, CRITIC = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic",
)
MODEL = "actor_rollout_ref.model"
# A model whose config.json has one of these reads images or sound.
TOWERS = ("vision_config", "audio_config", "thinker_config")
# Under these names models of transformers, and their modules, have shares of what they drop or move at random.
RANDOM = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "drop_prob"),
    *("activation_dropout", "residual_dropout", "embedding_dropout", "layerdrop"),
    *("jitter_noise", "input_jitter_noise", "router_jitter_noise"),
)

# The block of a role's FSDP engine.
FSDP_BLOCKS = {ACTOR: "fsdp_config", REFERENCE: "fsdp_config", CRITIC: "fsdp"}
ULYSSES = "ulysses_sequence_parallel_size"
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

Get = Callable[[str], Any]
# Key: the value that the key needs, and the words about any other value.
Needs = Mapping[str, tuple[Any, str]]


def getter(config: Mapping[str, Any]) -> Get:
    """Return a function that returns a value by dotted key; None where there is no such key."""
    return lambda key: OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]


def copied(config: DictConfig) -> DictConfig:
    """Return a copy of a configuration, where possible in a quarter of the time that `deepcopy` takes."""
    try:
        return pickle.loads(pickle.dumps(config))
    except (pickle.PicklingError, AttributeError, TypeError):
        # A program may have put objects of its own into it.
        return deepcopy(config)


def has_key(config: DictConfig, key: str) -> bool:
    """Tell whether there is such a dotted key, whatever its value: a value that verl leaves to the user (???) is one,
    and so is an item of a list."""
    parent, _, name = key.rpartition(".")
    block = OmegaConf.select(config, parent, default=None) if parent else config
    return isinstance(block, ListConfig) or (isinstance(block, DictConfig) and name in block.keys())  # noqa: SIM118


def required(get: Get, needs: Needs) -> Iterator[Refusal]:
    """Refuse keys that do not have the value they need."""
    for key, (value, allowed) in needs.items():
        if get(key) != value:
            yield Refusal(key, get(key), allowed, {key: value})


def required_if_set(get: Get, needs: Needs) -> Iterator[Refusal]:
    """Refuse keys that have another value than they need; unset, false, 0 and empty are no values."""
    return required(lambda key: get(key) or needs[key][0], needs)


def needed_beside(get: Get, feature: str, needs: Needs) -> Iterator[Refusal]:
    """Refuse keys, beside `feature` (KEY=VALUE), as `required_if_set` does; the words in `needs` say what it needs."""
    return required_if_set(get, {key: (value, f"{feature} needs {said}") for key, (value, said) in needs.items()})


def off_beside(get: Get, feature: str, off: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse keys, beside `feature` (KEY=VALUE), that have another value than the one in `off`; unset, false, 0 and
    empty are no values."""
    return needed_beside(get, feature, {key: (value, written(value)) for key, value in off.items()})


def of_mode_fuse(get: Get, feature: str) -> Iterator[Refusal]:
    """Refuse every trainer mode but `fuse` beside `feature` (KEY=VALUE)."""
    key = "trainer.v1.trainer_mode"
    return required(get, {key: ("fuse", f"{feature} needs {key}=fuse")})


def on_accelerators(get: Get) -> bool:
    """Tell whether the devices that verl uses are accelerators, and not the host (`trainer.device=cpu`)."""
    return get("trainer.device") != "cpu"


def is_legacy(config: Mapping[str, Any]) -> bool:
    """Tell whether verl's trainer before V1 runs, by verl's rule (verl.trainer.main_ppo); it reads other keys."""
    trainer = getter(config)("trainer")
    return isinstance(trainer, Mapping) and "use_v1" in trainer and not trainer["use_v1"]


def is_validation_only(get: Get) -> bool:
    """Tell whether the run ends before its first step (`PPOTrainer.fit`)."""
    return bool(get("trainer.val_only")) and get("trainer.val_before_train") is not False


def has_critic(get: Get) -> bool:
    """Tell whether the run has a critic, by verl's rule (verl.trainer.ppo.utils.need_critic)."""
    enabled = get("critic.enable")
    return get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def has_few_zeros(get: Get) -> str | None:
    """Return the reason why hardly any sample of the run has advantages of exactly 0; None where some may have."""
    if has_critic(get):
        return "a critic's advantages are hardly ever 0"
    if get("algorithm.adv_estimator") in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return "advantages are whitened over the batch, and hardly ever 0"
    if get("algorithm.filter_groups.enable") and get("algorithm.filter_groups.metric") == "reward":
        return "groups of equal rewards are filtered out"
    return None


def no_critic(get: Get) -> str | None:
    """Return a reason to leave alone what changes a critic's work: there is no critic."""
    return None if has_critic(get) else "there is no critic"


def one_replica(get: Get) -> str | None:
    """Return a reason to leave alone what chooses between rollout replicas: there is one."""
    return "there is one rollout replica" if training_devices(get) // replica_devices(get) < 2 else None


def training_devices(get: Get) -> int:
    """Return the number of training devices."""
    return (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)


def replica_devices(get: Get) -> int:
    """Return the number of devices of one rollout replica."""
    return math.prod(get(f"{ROLLOUT}.{kind}_parallel_size") or 1 for kind in ("tensor_model", "data", "pipeline_model"))


def has_adapters(get: Get) -> bool:
    """Tell whether the reference is the policy without its adapters, by verl's rule (`PPOTrainer.ref_in_actor`)."""
    return bool((get(f"{MODEL}.lora.rank") or 0) > 0 or (get(f"{MODEL}.lora_rank") or 0) > 0) or (
        get(f"{MODEL}.lora_adapter_path") is not None
    )


def has_reference(get: Get) -> bool:
    """Tell whether the run has a reference, by verl's rule (verl.trainer.ppo.utils.need_reference_policy)."""
    return bool(get("algorithm.use_kl_in_reward") or get("actor_rollout_ref.actor.use_kl_loss"))


def recomputes(get: Get) -> bool:
    """Tell whether the actor's update computes activations again; Megatron's engine has a key of its own."""
    if get(f"{ACTOR}.strategy") == "megatron":
        return get(f"{ACTOR}.megatron.override_transformer_config.recompute_granularity") == "full"
    return bool(get(f"{MODEL}.enable_gradient_checkpointing"))


def sequence_ranks(get: Get, role: str) -> int | None:
    """Return the number of ranks that share a sequence of the role's model; None where this is not known."""
    strategy = get(f"{role}.strategy")
    if strategy in ("fsdp", "fsdp2"):
        # verl copies the key of actor and reference into their engines, not the critic's (verl/workers/config).
        own = None if role == CRITIC else get(f"{role}.{ULYSSES}")
        ranks = own if own and own > 1 else get(f"{role}.{FSDP_BLOCKS[role]}.{ULYSSES}")
    elif strategy == "megatron" and not get(f"{role}.megatron.dynamic_context_parallel"):
        ranks = get(f"{role}.megatron.context_parallel_size")
    else:
        return None
    return ranks if is_count(ranks) else None


def data_parallel_ranks(get: Get, role: str) -> int | None:
    """Return the data-parallel ranks of the role's engine on the trainer's devices; None where this is not known."""
    world, each = product(get, "trainer", ("nnodes", "n_gpus_per_node")), sequence_ranks(get, role)
    if each is not None and get(f"{role}.strategy") == "megatron":
        each = product(get, f"{role}.megatron", _MODEL_PARALLEL)
    return world // each if world and each and world % each == 0 else None


def product(get: Get, block: str, names: tuple[str, ...]) -> int | None:
    """Return the product of these keys; None unless all of them are whole numbers >= 1."""
    found = 1
    for name in names:
        value = get(f"{block}.{name}")
        if not is_count(value):
            return None
        found *= value
    return found


def is_count(value: Any) -> TypeGuard[int]:
    """Tell whether a value is a whole number >= 1."""
    return isinstance(value, int) and value >= 1
