"""Comments of default.yaml on the keys that a key needs and excludes, against the plugins' refusals: found by trying
values of every key that the plugins read."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins

ROLLOUT = "actor_rollout_ref.rollout"
COMMON = {
    "trainer.v1.trainer_mode": "fuse",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 4,
    "algorithm.adv_estimator": "gae",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.dtype": "bfloat16",
}
MODELS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
ENGINES = {
    "fsdp2": {f"{model}.strategy": "fsdp2" for model in MODELS},
    "megatron": {f"{model}.strategy": "megatron" for model in MODELS}
    | {f"{model}.megatron.pipeline_model_parallel_size": 2 for model in MODELS},
}
ON = {"fuse.interstage.enabled": True, "fuse.elastic.enabled": True}
SLICES = {**ON, "fuse.interstage.layout": "slices"}
PLACED = {"first": 2, "devices": 2}
CPU = {"trainer.device": "cpu", "critic.ppo_mini_batch_size": 4}
PARKED = {"fuse.elastic.enabled": True, "fuse.elastic.max_replicas": 2}
ONE_MINI_BATCH = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
SEVERAL_MINI_BATCHES = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
ONE_CRITIC_BATCH = {"data.train_batch_size": 8, "critic.ppo_mini_batch_size": 8}
STREAMED = {
    **ONE_MINI_BATCH,
    **ON,
    "fuse.update.skip_old_log_prob": True,
    "fuse.elastic.release": True,
    "fuse.interstage.enabled": False,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": 1,
}
# A key that asks something of the run, the value that asks it, what else is set then, and an engine it can run with.
CASES: tuple[tuple[str, Any, Mapping[str, Any], str], ...] = (
    ("fuse.interstage.enabled", True, {}, "fsdp2"),
    ("fuse.interstage.enabled", True, {}, "megatron"),
    ("fuse.interstage.layout", "slices", ON, "fsdp2"),
    ("fuse.interstage.layout", "slices", {**ON, "actor_rollout_ref.actor.use_kl_loss": True}, "fsdp2"),
    ("fuse.interstage.migration_threshold", 0.2, ON, "fsdp2"),
    ("fuse.interstage.migration_threshold", "auto", SLICES, "fsdp2"),
    ("fuse.interstage.kv_transfer_params", {"tag": "none"}, ON, "fsdp2"),
    ("fuse.elastic.enabled", True, {}, "fsdp2"),
    ("fuse.elastic.scale", True, ON, "fsdp2"),
    ("fuse.elastic.min_replicas", 2, ON, "fsdp2"),
    ("fuse.elastic.max_replicas", 2, ON, "fsdp2"),
    ("fuse.elastic.standalone", 1, ON, "fsdp2"),
    ("fuse.elastic.release", True, ON, "fsdp2"),
    ("fuse.elastic.cut_fraction", 0.9, {**ON, "fuse.elastic.release": True}, "fsdp2"),
    ("fuse.pipeline.enabled", True, {}, "megatron"),
    ("fuse.placement.critic", {"first": 0, "devices": 4}, CPU, "fsdp2"),
    ("fuse.placement.critic", "auto", {"fuse.elastic.enabled": True, **CPU}, "fsdp2"),
    ("fuse.placement.critic", "auto", {"fuse.elastic.enabled": True, **CPU, "trainer.device": "cuda"}, "fsdp2"),
    ("fuse.placement.defer", True, {"fuse.placement.critic": PLACED, **CPU}, "fsdp2"),
    ("fuse.placement.defer", True, {"fuse.placement.critic": PLACED, **PARKED}, "fsdp2"),
    ("fuse.realloc.weight_sync", "shards", {}, "fsdp2"),
    ("fuse.realloc.weight_sync", "shards", {}, "megatron"),
    ("fuse.speculation.enabled", True, {}, "fsdp2"),
    ("fuse.update.skip_zero_gradient", True, {}, "fsdp2"),
    ("fuse.update.skip_zero_gradient", True, {}, "megatron"),
    ("fuse.update.skip_old_log_prob", True, SEVERAL_MINI_BATCHES, "fsdp2"),
    ("fuse.update.skip_old_log_prob", True, SEVERAL_MINI_BATCHES, "megatron"),
    ("fuse.update.skip_values", True, ONE_CRITIC_BATCH, "fsdp2"),
    ("fuse.update.skip_values", True, ONE_CRITIC_BATCH, "megatron"),
    ("fuse.update.balance", True, ONE_CRITIC_BATCH, "fsdp2"),
    ("fuse.update.balance", True, ONE_CRITIC_BATCH, "megatron"),
    ("fuse.update.response_logits", True, {}, "fsdp2"),
    ("fuse.update.share_prompts", True, {"actor_rollout_ref.actor.use_kl_loss": True}, "fsdp2"),
    ("fuse.update.share_prompts", True, {"trainer.device": "cuda"}, "fsdp2"),
    ("fuse.update.stream", True, STREAMED, "fsdp2"),
)
VALUES = (
    None,
    True,
    False,
    1,
    3,
    0.5,
    "x",
    "shared",
    "optimal_token_baseline",
    "seq-mean-token-sum-norm",
    "delta_sharded",
    {"kv_connector": "MooncakeStoreConnector"},
    PLACED,
)


@pytest.fixture(scope="module")
def refused() -> dict[str, set[str]]:
    """By key of `fuse`: the other keys of which some value is refused because of it."""
    found: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        validate, read = plugins.load(["cpu"]).hook.fuse_validate, set()

        def select(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
            read.add(key)
            return config.get(key, default)

        # A configuration is a flat mapping here: OmegaConf's own takes a minute for the thousands that are tried.
        patch.setattr(OmegaConf, "select", select)

        def reasons(config: Mapping[str, Any]) -> set[str]:
            try:
                return {str((r.key, r.allowed)) for refusals in validate(config=config) for r in refusals or ()}
            except (TypeError, ValueError, AttributeError):
                # A value of a type that no check expects: it is refused, but not because of another key.
                return set()

        for switch, value, needed, engine in CASES:
            off = COMMON | ENGINES[engine] | dict(needed)
            on = off | {switch: value}
            assert reasons(on) == set(), f"{switch}={value!r} cannot run with {engine}"
            tried = {switch}
            # What a block asks of its own keys once it is on stands at those keys.
            own = switch.removesuffix("enabled")
            while keys := {key for key in read - tried if not (switch.endswith(".enabled") and key.startswith(own))}:
                tried |= keys
                found.setdefault(switch, set()).update(
                    key
                    for key, probe in itertools.product(keys, VALUES)
                    if reasons(on | {key: probe}) - reasons(off | {key: probe})
                )
    return found


def stated(text: str) -> Iterator[tuple[str, set[str]]]:
    """(key, the keys in the sentences of its comment that begin with "Needs" or "Not with") of default.yaml."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        if ":" in stripped:
            path = [*path[: (len(line) - len(line.lstrip())) // 2], stripped.partition(":")[0]]
            sentences = re.findall(r"(?:^|\. )(?=((?:Needs|Not with) .*?(?:\. |\.?$)))", " ".join(comment))
            yield ".".join(path), {key for sentence in sentences for key in _keys(sentence)}
        comment = []


def _keys(sentence: str) -> Iterator[str]:
    part = r"(?:\w+|\{[\w.,]+\})"
    for name in re.findall(rf"{part}(?:\.{part})+", sentence):
        choices = [
            part[1:-1].split(",") if part.startswith("{") else [part] for part in re.findall(r"\{[^}]*\}|[^{}]+", name)
        ]
        yield from map("".join, itertools.product(*choices))


def test_every_key_says_what_it_needs_and_excludes(repo, refused):
    text = (repo / "verl_fuse/host/config/fuse/default.yaml").read_text()
    said = dict(stated(text))
    # Where this fails, add to or take from the comment of the key; a key that newly asks something of the
    # run is a new case above.
    missing = {key: sorted(keys - said[key]) for key, keys in refused.items() if keys - said[key]}
    beyond = {
        key: sorted(keys - refused.get(key, set())) for key, keys in said.items() if keys - refused.get(key, set())
    }
    assert (missing, beyond) == ({}, {})


def test_statements_are_read_as_they_are_written():
    text = (
        "fuse:\n  # Some text. Needs a.b=fuse and {c.d,e}.f.\n  # Not with g.{h,i}. More of x.y.\n  key: 1\n"
        "  # Plain.\n  other: 2\n"
    )
    assert dict(stated(text)) == {"fuse": set(), "fuse.key": {"a.b", "c.d.f", "e.f", "g.h", "g.i"}, "fuse.other": set()}
