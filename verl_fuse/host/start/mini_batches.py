"""Checks that the ranks of a model divide its mini-batch, which verl asserts in the first update
(verl/workers/engine_workers.py `train_mini_batch`).

Invariant (tests/unit/host/test_mini_batches.py): a configuration refused here ends in stock verl 0.9.1 in that
assertion; a model that is not trained, or whose engine has other ranks than those computed here, is left to verl.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

from omegaconf import DictConfig

from verl_fuse.spec.composed import ACTOR, CRITIC, ROLLOUT, Get, getter, has_critic, is_legacy, is_validation_only
from verl_fuse.spec.step import Refusal

_ENGINES = {ACTOR: "fsdp_config", CRITIC: "fsdp"}
_SEQUENCES = "ulysses_sequence_parallel_size"
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def mini_batch_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a mini-batch that the data-parallel ranks of actor or critic do not divide."""
    get = getter(config)
    if is_legacy(config) or is_validation_only(get):
        return
    samples = get(f"{ROLLOUT}.n")
    for role in _trained(get):
        key = f"{role}.ppo_mini_batch_size"
        ranks, prompts = _ranks(get, role), get(key)
        if not (_is_count(ranks) and _is_count(prompts) and _is_count(samples)):
            continue
        if prompts * samples % ranks:
            allowed = (
                f"times {ROLLOUT}.n={samples} are {prompts * samples} samples: needs a multiple of the {ranks} "
                "data-parallel ranks"
            )
            yield Refusal(key, prompts, allowed)


def _trained(get: Get) -> Iterator[str]:
    warmup, steps = get("trainer.critic_warmup") or 0, get("trainer.total_training_steps")
    if steps is None or warmup <= steps:
        yield ACTOR
    # A critic with devices of its own has other ranks.
    if has_critic(get) and not get("fuse.placement.critic"):
        yield CRITIC


def _ranks(get: Get, role: str) -> int | None:
    """Return the data-parallel ranks of the role's engine; None where this is not known."""
    world, strategy = _product(get, "trainer", ("nnodes", "n_gpus_per_node")), get(f"{role}.strategy")
    if world is None:
        return None
    if strategy in ("fsdp", "fsdp2"):
        # verl copies the actor's own key into its engine, not the critic's (verl/workers/config).
        own = get(f"{role}.{_SEQUENCES}") if role == ACTOR else None
        each = own if own and own > 1 else get(f"{role}.{_ENGINES[role]}.{_SEQUENCES}")
    elif strategy == "megatron" and not get(f"{role}.megatron.dynamic_context_parallel"):
        each = _product(get, f"{role}.megatron", _MODEL_PARALLEL)
    else:
        return None
    return world // each if _is_count(each) and world % each == 0 else None


def _product(get: Get, block: str, names: tuple[str, ...]) -> int | None:
    """Return the product of these keys; None unless all of them are whole numbers >= 1."""
    product = 1
    for name in names:
        value = get(f"{block}.{name}")
        if not _is_count(value):
            return None
        product *= value
    return product


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value >= 1
