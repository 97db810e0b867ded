"""In which order changes are tried: the settings with the most to gain first, and of each the best guess first.

Invariants (tests/unit/tune/test_order.py): every pattern stands for a key of the table; a guess is one of the values,
other than the current one, and no value is guessed twice.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeGuard

from verl_fuse.spec.composed import ACTOR, CRITIC, MODEL, ROLLOUT
from verl_fuse.tune.candidates import Candidate
from verl_fuse.tune.setting import Value

Guess: TypeAlias = Literal["largest", "nearest", "listed"]


@dataclass(frozen=True)
class Expected:
    """Keys by a pattern, the number to try first (the largest, or the one nearest to the current, a larger one before a
    smaller one; else as the table lists them), and why they are tried at this place."""

    pattern: str
    guess: Guess
    reason: str


# The first match decides; all other keys come last, in the table's order.
ORDER: tuple[Expected, ...] = (
    Expected("*.use_dynamic_bsz", "listed", "with rows of many lengths most of a padded micro-batch is padding"),
    Expected("*.log_prob_use_dynamic_bsz", "listed", "as for the update"),
    Expected("*max_token_len_per_gpu", "largest", "each micro-batch reads all weights anew; fewer are faster"),
    Expected("*micro_batch_size_per_gpu", "largest", "as budgets of tokens"),
    Expected(f"{ROLLOUT}.max_num_seqs", "largest", "requests that wait for a place begin when others have ended"),
    Expected("*.enable_gradient_checkpointing", "listed", "computes the forward pass twice"),
    Expected("*_offload", "listed", "copies all weights between host and device, twice a step"),
    Expected("*.offload_policy", "listed", "as offloads; the optimizer steps on the host as well"),
    Expected("*.recompute_*", "listed", "as gradient checkpointing"),
    Expected(f"{ROLLOUT}.enforce_eager", "listed", "short passes wait for their kernels to be launched one by one"),
    Expected(
        f"{ROLLOUT}.tensor_model_parallel_size", "nearest", "ranks of a replica wait for each other in each layer"
    ),
    Expected(f"{ROLLOUT}.gpu_memory_utilization", "nearest", "a full KV cache preempts requests"),
    Expected(f"{ROLLOUT}.max_num_batched_tokens", "nearest", "prompts are computed in fewer passes"),
    Expected(f"{MODEL}.use_remove_padding", "listed", "padding is computed like tokens"),
    Expected(f"{CRITIC}.model.use_remove_padding", "listed", "padding is computed like tokens"),
    Expected(f"{MODEL}.use_fused_kernels", "listed", "logits of all tokens are not kept"),
    Expected(f"{ACTOR}.fsdp_config.reshard_after_forward", "listed", "gathers the weights once instead of twice"),
    Expected("*.num_workers", "nearest", "matters where the driver's side of a request takes long"),
)


def rank(key: str) -> int:
    """Return the place of a key in the order; keys that no pattern stands for share the last one."""
    return next((place for place, each in enumerate(ORDER) if fnmatchcase(key, each.pattern)), len(ORDER))


def guesses(candidate: Candidate) -> tuple[Value, ...]:
    """Return the values to try in a candidate's place, the best guess first."""
    current, place = candidate.current, rank(candidate.setting.key)
    others = [value for value in candidate.values if value != current]
    guess: Guess = ORDER[place].guess if place < len(ORDER) else "nearest"
    sizes = [value for value in others if _is_size(value)]
    if guess == "largest" and len(sizes) == len(others):
        return tuple(sorted(sizes, reverse=True))
    if guess == "nearest" and len(sizes) == len(others) and _is_size(current):
        ordered = sorted(sizes, key=lambda size: (size < current, abs(math.log(size / current))))
        return tuple(ordered)
    return tuple(others)


def _is_size(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
