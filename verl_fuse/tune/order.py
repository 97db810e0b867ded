"""In which order changes are tried: the settings with the most to gain first, and of each the best guess first.

Invariants (tests/unit/tune/test_order.py):
- every pattern stands for a key of the table, or for switches of features; a guess is one of the values, other than the
  current one, and no value is guessed twice;
- values that a setting's entry expects to be faster come first, those that it expects to be slower last, whatever the
  setting; between them come values of which nothing is expected;
- keys of one pattern, such as the budgets of all passes, are changed together before one of them alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeGuard

from verl_fuse.spec.composed import ACTOR, CRITIC, MODEL, ROLLOUT
from verl_fuse.tune.candidates import Candidate
from verl_fuse.tune.setting import FEATURES, Value

# Of sizes: the largest first; the next larger or smaller one first; the nearest first, with nothing expected. Of other
# values: a tuple of the one that is faster, as far as is known; an empty one where nothing is expected.
Guess: TypeAlias = Literal["largest", "larger", "smaller", "nearest"] | tuple[Value, ...]
BETTER, UNKNOWN, WORSE = range(3)


@dataclass(frozen=True)
class Expected:
    """Keys by a pattern, the guess at faster values, and why they are tried at this place."""

    pattern: str
    guess: Guess
    reason: str


# The first match decides; all other keys come last, in the table's order.
ORDER: tuple[Expected, ...] = (
    Expected("*max_token_len_per_gpu", "largest", "each micro-batch reads all weights anew; fewer are faster"),
    Expected("*micro_batch_size_per_gpu", "largest", "as budgets of tokens"),
    Expected("*use_dynamic_bsz", (True,), "with rows of many lengths most of a padded micro-batch is padding"),
    Expected(f"{FEATURES}*", (True,), "those that the preset chooses, first together"),
    Expected(f"{ROLLOUT}.max_num_seqs", "largest", "requests that wait for a place begin when others have ended"),
    Expected("*.enable_gradient_checkpointing", (False,), "computes the forward pass twice"),
    Expected("*_offload", (False,), "copies all weights between host and device, twice a step"),
    Expected("*.offload_policy", (False,), "as offloads; the optimizer steps on the host as well"),
    Expected("*.recompute_*", (None,), "as gradient checkpointing"),
    Expected(f"{ROLLOUT}.enforce_eager", (False,), "short passes wait for their kernels to be launched one by one"),
    Expected(
        f"{ROLLOUT}.tensor_model_parallel_size", "smaller", "ranks of a replica wait for each other in each layer"
    ),
    Expected(f"{ROLLOUT}.gpu_memory_utilization", "larger", "a full KV cache preempts requests"),
    Expected(f"{ROLLOUT}.max_num_batched_tokens", "larger", "prompts are computed in fewer passes"),
    Expected("*.use_remove_padding", (True,), "padding is computed like tokens"),
    Expected(f"{MODEL}.use_fused_kernels", (), "logits of all tokens are not kept, and computed again"),
    Expected(f"{ACTOR}.fsdp_config.reshard_after_forward", (False,), "gathers the weights once instead of twice"),
    Expected(f"{CRITIC}.fsdp.reshard_after_forward", (False,), "as the actor's"),
    Expected(f"{ROLLOUT}.enable_prefix_caching", (True,), "samples of a prompt share its keys and values"),
    Expected("*.num_workers", "nearest", "matters where the driver's side of a request takes long"),
)


@dataclass(frozen=True)
class Change:
    """Values that are tried together, of one key or of all keys of a pattern; what is expected of them (BETTER, UNKNOWN
    or WORSE), and their place in the order."""

    values: tuple[tuple[Candidate, Value], ...]
    hope: int
    place: int

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(candidate.setting.key for candidate, _ in self.values)


def rank(key: str) -> int:
    """Return the place of a key in the order; keys that no pattern stands for share the last one."""
    return next((place for place, each in enumerate(ORDER) if fnmatchcase(key, each.pattern)), len(ORDER))


def guesses(candidate: Candidate) -> tuple[tuple[Value, int], ...]:
    """Return the values to try in a candidate's place with what is expected of them, the best guess first."""
    current, place = candidate.current, rank(candidate.setting.key)
    others = [value for value in candidate.values if value != current]
    guess: Guess = ORDER[place].guess if place < len(ORDER) else "nearest"
    sizes = [value for value in others if _is_size(value)]
    if isinstance(guess, tuple) or len(sizes) < len(others):
        best = guess if isinstance(guess, tuple) and all(value in [*others, current] for value in guess) else ()
        hopes = {True: BETTER, False: WORSE} if best else {False: UNKNOWN}
        found = [(value, hopes[value in best]) for value in others]
    elif guess == "largest":
        least = current if _is_size(current) else 0
        found = [(size, BETTER if size > least else WORSE) for size in sorted(sizes, reverse=True)]
    elif not _is_size(current):
        found = [(size, UNKNOWN) for size in sizes]
    else:
        sides = {"larger": (BETTER, WORSE), "smaller": (WORSE, BETTER)}.get(guess, (UNKNOWN, UNKNOWN))
        nearest = sorted(sizes, key=lambda size: (size < current, abs(math.log(size / current))))
        found = [(size, sides[size < current]) for size in nearest]
    return tuple(sorted(found, key=lambda each: each[1]))


def changes(candidates: Sequence[Candidate]) -> Iterator[Change]:
    """Yield all changes that candidates leave, those of a pattern's keys together before those of one key; of equal
    keys the best guess first."""
    groups: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(rank(candidate.setting.key), []).append(candidate)
    for place, group in sorted(groups.items()):
        better = {each.setting.key: [value for value, hope in guesses(each) if hope == BETTER] for each in group}
        members = [each for each in group if better[each.setting.key]]
        if place < len(ORDER) and len(members) > 1:
            for level in range(max(len(better[each.setting.key]) for each in members)):
                # One that has no other good guess stays at its last.
                values = ((each, better[each.setting.key][: level + 1][-1]) for each in members)
                yield Change(tuple(values), BETTER, place)
        for candidate in group:
            yield from (Change(((candidate, value),), hope, place) for value, hope in guesses(candidate))


def _is_size(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
