"""Checks that the ranks of a model divide its mini-batch, which verl asserts in the first update
(verl/workers/engine_workers.py `train_mini_batch`).

Invariant (tests/unit/host/test_mini_batches.py): a configuration refused here ends in stock verl 0.9.1 in that
assertion; a model that is not trained, or whose engine has other ranks than those computed here, is left to verl.
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    Get,
    data_parallel_ranks,
    getter,
    has_critic,
    is_count,
    is_legacy,
    is_validation_only,
)
from verl_fuse.spec.step import Refusal


def mini_batch_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a mini-batch that the data-parallel ranks of actor or critic do not divide."""
    get = getter(config)
    if is_legacy(config) or is_validation_only(get):
        return
    samples = get(f"{ROLLOUT}.n")
    for role in _trained(get):
        key = f"{role}.ppo_mini_batch_size"
        ranks, prompts = data_parallel_ranks(get, role), get(key)
        if not (is_count(ranks) and is_count(prompts) and is_count(samples)):
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
