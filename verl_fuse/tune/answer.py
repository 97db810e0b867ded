"""Says what trials have shown: seconds of base and best, their ratio, and one sentence.

Invariants (tests/unit/tune/test_answer.py):
- where finals were held they alone decide, because a trial that was chosen for its speed was also lucky;
- the base is the answer unless the 95 % interval of the ratio lies below 1; without finals the fastest trial is the
  answer, and the sentence says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_fuse.compare.intervals import Interval, mean, ratio
from verl_fuse.compare.verdict import interval_text
from verl_fuse.tune.search import KEPT, Overrides, Trial, fastest

NOTHING = "nothing better than what you have"


@dataclass(frozen=True)
class Answer:
    """The overrides of the best (none: the base), seconds a step of base and best, best over base, and the verdict."""

    overrides: Overrides
    base: Interval
    best: Interval
    ratio: Interval
    verdict: str


def answer(trials: Sequence[Trial], *, interrupted: bool = False) -> Answer:
    """Judge the trials of a search, of which the first is the base and measured."""
    found = _answer(trials)
    early = "ended before all trials were made; " if interrupted else ""
    return Answer(found.overrides, found.base, found.best, found.ratio, early + found.verdict)


def _answer(trials: Sequence[Trial]) -> Answer:
    base = trials[0]
    if not (found := fastest(trials)):
        others, least = len(trials) - 1, 1 - KEPT
        tried = f"none of {others} other trials was faster by {least:.0%}" if others else "the base alone was tried"
        return _stays(base.outcome.seconds, f"{NOTHING}: {tried}")
    pairs = _finals(trials)
    if not pairs:
        one, other = base.outcome.seconds, found[0].outcome.seconds
        between = _ratio(one, other)
        remark = f"the fastest trial took {interval_text(between)} of the base's steps; it was not measured again"
        return Answer(found[0].overrides, mean(one), mean(other), between, remark)
    # The finalist of most turns, and of these the fastest.
    overrides, one, other = min(pairs, key=lambda each: (-len(each[1]), sum(each[2]) / sum(each[1])))
    between = _ratio(one, other)
    if between.high is None or between.high >= 1:
        remark = f"measured again in turn, the fastest finalist took {interval_text(between)} of the base's steps"
        return _stays(one, f"{NOTHING}: {remark}")
    remark = f"steps take {interval_text(between)} of the base's, measured again in turn"
    return Answer(overrides, mean(one), mean(other), between, remark)


def _finals(trials: Sequence[Trial]) -> list[tuple[Overrides, list[float], list[float]]]:
    """Return (overrides, seconds of the base, seconds of the finalist), step by step of the turns that both have."""
    turns = {(trial.overrides, trial.turn): trial.outcome.seconds for trial in trials if trial.turn and trial.measured}
    found: dict[Overrides, tuple[list[float], list[float]]] = {}
    for (overrides, turn), seconds in turns.items():
        if overrides and ((), turn) in turns:
            both = list(zip(turns[(), turn], seconds, strict=False))
            one, other = found.setdefault(overrides, ([], []))
            one.extend(first for first, _ in both)
            other.extend(second for _, second in both)
    return [(overrides, *series) for overrides, series in found.items()]


def _ratio(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the ratio step by step: step N of both trains on the same prompts."""
    steps = min(len(one), len(other))
    return ratio(one[:steps], other[:steps])


def _stays(seconds: Sequence[float], verdict: str) -> Answer:
    base = mean(seconds)
    return Answer((), base, base, Interval(1.0, 1.0, 1.0), verdict)
