"""Checks that the ranks of a model divide its mini-batch, which verl asserts in the first update
(verl/workers/engine_workers.py `train_mini_batch`), and what verl asserts of batches first of all
(verl/utils/config.py `validate_config`). verl fills up a batch that its mini-batches do not divide.

Invariant (tests/unit/host/test_mini_batches.py): a configuration refused here ends in stock verl 0.9.1 in one of these
assertions; a model that is not trained, or whose engine has other ranks than those computed here, is left to verl.
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
    product,
)
from verl_fuse.spec.step import Refusal

_BATCH = "data.train_batch_size"


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


def batch_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a mini-batch larger than the batch, and a batch that verl does not spread over its devices, where
    micro-batches are not cut by tokens."""
    get = getter(config)
    batch, samples = get(_BATCH), get(f"{ROLLOUT}.n")
    if is_legacy(config) or not is_count(batch):
        return
    for role in (ACTOR, CRITIC) if has_critic(get) else (ACTOR,):
        key = f"{role}.ppo_mini_batch_size"
        if not get(f"{role}.use_dynamic_bsz") and is_count(prompts := get(key)) and prompts > batch:
            yield Refusal(key, prompts, f"needs at most {_BATCH}={batch}, or {role}.use_dynamic_bsz=true")
    each, unit = product(get, "trainer", ("nnodes", "n_gpus_per_node")), "devices"
    if get(f"{ACTOR}.strategy") == "megatron":
        ranks, micro = data_parallel_ranks(get, ACTOR), get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        each = ranks * micro if ranks and is_count(micro) else None
        unit = "samples in a micro-batch of all data-parallel ranks"
    if not get(f"{ACTOR}.use_dynamic_bsz") and each and is_count(samples) and batch * samples % each:
        allowed = f"times {ROLLOUT}.n={samples} are {batch * samples} samples: needs a multiple of the {each} {unit}"
        yield Refusal(_BATCH, batch, f"{allowed}, or {ACTOR}.use_dynamic_bsz=true")


def _trained(get: Get) -> Iterator[str]:
    warmup, steps = get("trainer.critic_warmup") or 0, get("trainer.total_training_steps")
    if steps is None or warmup <= steps:
        yield ACTOR
    # A critic with devices of its own has other ranks.
    if has_critic(get) and not get("fuse.placement.critic"):
        yield CRITIC
