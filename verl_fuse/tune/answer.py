"""Says what trials have shown: seconds of base and best, their ratio, and one sentence.

Invariants (tests/unit/tune/test_answer.py):
- where finals were held they alone decide, because a trial that was chosen for its speed was also lucky;
- the base is the answer unless the 95 % interval of the ratio lies above 1; without finals the fastest trial whose
  interval does is the answer, and the sentence says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_fuse.compare.intervals import Interval, mean
from verl_fuse.compare.verdict import interval_text
from verl_fuse.tune.lengths import at_equal_lengths
from verl_fuse.tune.pairs import KEPT, Pairs, between, fastest, of_whole_steps, sure, whole_steps
from verl_fuse.tune.trial import Overrides, Trial

NOTHING = "nothing better than what you have"


@dataclass(frozen=True)
class Answer:
    """The overrides of the best (none: the base), seconds a step of base and best, base over best, and the verdict."""

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
    base = trials[0].outcome.seconds
    if finals := _finals(trials):
        # The finalist of most turns, and of these the fastest.
        overrides, _, pairs = min(finals, key=lambda each: (-each[1], between(each[2]).value))
        found = between(pairs)
        if found.high is None or found.high >= 1:
            faster = f"{interval_text(found.inverse)} times as fast as the base"
            remark = f"measured again in turn, the fastest finalist was {faster}"
            return _stays([one for one, _ in pairs], f"{NOTHING}: {remark}")
        faster = f"{interval_text(found.inverse)} times as fast as the base's"
        return _best(overrides, pairs, f"steps are {faster}, measured again in turn")
    if not (tried := fastest(trials)):
        others, least = len({trial.overrides for trial in trials if trial.overrides}), 1 - KEPT
        remark = f"none of {others} other trials was faster by {least:.0%}" if others else "the base alone was tried"
        return _stays(base, f"{NOTHING}: {remark}")
    ratios = {each: between(whole_steps(trials, each)) for each in tried}
    overrides = next((each for each in tried if sure(ratios[each])), tried[0])
    took = f"the fastest trial was {interval_text(ratios[overrides].inverse)} times as fast as the base"
    if not sure(ratios[overrides]):
        return _stays(base, f"{NOTHING}: {took}, and noise may be the reason; it was not measured again")
    return _best(overrides, whole_steps(trials, overrides), f"{took}; it was not measured again")


def _finals(trials: Sequence[Trial]) -> list[tuple[Overrides, int, Pairs]]:
    """Return (overrides, turns, seconds of the base and of the finalist), step by step of the turns that both have; of
    replays the turns' mean, by the steps that they repeat."""
    finals = [trial for trial in trials if trial.turn and trial.measured]
    if not (replays := any(trial.replayed for trial in finals)):
        finals = [trial for trial in at_equal_lengths(trials) if trial.turn and trial.measured]
    turns = {(trial.overrides, trial.turn): trial.outcome.seconds for trial in finals if trial.replayed == replays}
    found: dict[Overrides, list[Pairs]] = {}
    for (overrides, turn), seconds in turns.items():
        if overrides and (base := turns.get(((), turn))):
            found.setdefault(overrides, []).append(list(zip(base, seconds, strict=False)))
    if not replays:
        return [(overrides, len(made), [pair for pairs in made for pair in pairs]) for overrides, made in found.items()]
    recorded = next((trial.outcome.seconds for trial in finals if not trial.replayed), ())
    return [(overrides, len(made), of_whole_steps(recorded, _mean(made))) for overrides, made in found.items()]


def _mean(turns: Sequence[Pairs]) -> Pairs:
    """Return the mean of the same steps in several turns."""
    steps = (zip(*pairs, strict=True) for pairs in zip(*turns, strict=False))
    return [(sum(before) / len(before), sum(after) / len(after)) for before, after in steps]


def _best(overrides: Overrides, pairs: Pairs, verdict: str) -> Answer:
    one, other = zip(*pairs, strict=True)
    return Answer(overrides, mean(one), mean(other), between(pairs).inverse, verdict)


def _stays(seconds: Sequence[float], verdict: str) -> Answer:
    base = mean(seconds)
    return Answer((), base, base, Interval(1.0, 1.0, 1.0), verdict)
