"""Compares two configurations by the trials that both have, step by step: step N trains on the same prompts, and where
it is replayed on the same responses, so that what differs between steps is no noise.

Invariants (tests/unit/tune/test_paired_trials.py):
- live trials are compared with live ones, replayed ones with replayed ones, of the same number of steps first;
- live trials are compared at equal lengths (lengths.py): each draws its own responses;
- a gain counts where the 95 % interval of the ratio lies below 1; one of the same size whose interval does not is in
  doubt, and no gain yet.
"""

from collections.abc import Sequence
from typing import TypeAlias

from verl_fuse.compare.intervals import Interval, ratio
from verl_fuse.tune.lengths import at_equal_lengths
from verl_fuse.tune.trial import Overrides, Trial, same

Pairs: TypeAlias = list[tuple[float, float]]

# A change is kept where steps take this share of the best so far or less: each would be one line more to paste.
KEPT = 0.98


def paired(trials: Sequence[Trial], one: Overrides, other: Overrides, *, replayed: bool = False) -> Pairs:
    """Return the seconds of both, step by step, of the trials outside the finals; none unless both were measured."""
    if not replayed:
        trials = at_equal_lengths(trials)
    first, second = (_series(trials, overrides, replayed) for overrides in (one, other))
    lengths = [length for length in first if length in second]
    pairs = [pair for length in lengths for pair in zip(first[length], second[length], strict=True)]
    if pairs or not first or not second:
        return pairs
    return list(zip(first[max(first)], second[max(second)], strict=False))


def whole_steps(trials: Sequence[Trial], overrides: Overrides) -> Pairs:
    """Return seconds of whole steps of the base and of overrides: of live trials; where there is none, the base's less
    what replays save, at least the replayed step itself. None where overrides were not measured."""
    if live := paired(trials, (), overrides):
        return live
    return of_whole_steps(trials[0].outcome.seconds, paired(trials, (), overrides, replayed=True))


def of_whole_steps(seconds: Sequence[float], replays: Pairs) -> Pairs:
    """Return pairs of whole steps from those of their replays: what the second of each saves, of the steps' seconds."""
    return [
        (whole, max(whole - (before - after), after)) for whole, (before, after) in zip(seconds, replays, strict=False)
    ]


def between(pairs: Pairs) -> Interval:
    """Return the ratio of the second of each pair to the first."""
    one, other = zip(*pairs, strict=True)
    return ratio(one, other)


def gains(found: Interval) -> bool:
    """Tell whether a ratio is a gain of the size that counts, whether or not it can be told from noise."""
    return found.value <= KEPT


def sure(found: Interval) -> bool:
    """Tell whether a ratio is a gain that can be told from noise."""
    return gains(found) and found.high is not None and found.high < 1


def fastest(trials: Sequence[Trial]) -> list[Overrides]:
    """Return the overrides whose trials outside the finals gained over the base, which is the first trial, in doubt or
    not; the fastest first."""
    tried = dict.fromkeys(trial.overrides for trial in trials if trial.overrides and trial.measured and not trial.turn)
    ratios = {each: between(pairs) for each in tried if (pairs := whole_steps(trials, each))}
    return sorted((each for each, found in ratios.items() if gains(found)), key=lambda each: ratios[each].value)


def _series(trials: Sequence[Trial], overrides: Overrides, replayed: bool) -> dict[int, tuple[float, ...]]:
    return {
        len(trial.outcome.seconds): trial.outcome.seconds
        for trial in trials
        if trial.measured and not trial.turn and trial.replayed == replayed and same(trial.overrides, overrides)
    }
