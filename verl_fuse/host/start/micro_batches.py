"""Checks micro-batch sizes: sizes that verl reads when its workers start, minutes after its own checks, and sizes that
verl checks one at a time.

Invariant (tests/unit/host/test_micro_batches.py): a configuration refused here ends in stock verl 0.9.1 in an error as
well (verl/utils/config.py `validate_config`, verl/workers/engine_workers.py `init_model`); a key that the configuration
lacks is not demanded.
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_fuse.spec.composed import Get, getter, has_adapters, has_critic, has_reference, is_legacy
from verl_fuse.spec.step import Refusal

_ACTOR, _ROLLOUT, _REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def micro_batch_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse keys that must be a number of samples and are not, for the models of this run whose micro-batches are not
    cut by tokens."""
    get = getter(config)
    if is_legacy(config):
        return
    for dynamic, size in _needed(get):
        parent, _, name = size.rpartition(".")
        block = get(parent)
        if isinstance(block, DictConfig) and name in block and not get(dynamic):
            value = block[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield Refusal(size, value, f"needs a whole number of samples >= 1, or {dynamic}=true")


def _needed(get: Get) -> Iterator[tuple[str, str]]:
    """Yield per model of the run: the key that has micro-batches cut by tokens, and the key of their size in
    samples."""
    yield f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    # verl wants one answer for the actor's training and its log-probs.
    yield f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    if has_reference(get) and not has_adapters(get):
        yield f"{_REFERENCE}.log_prob_use_dynamic_bsz", f"{_REFERENCE}.log_prob_micro_batch_size_per_gpu"
    if has_critic(get):
        yield "critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu"
