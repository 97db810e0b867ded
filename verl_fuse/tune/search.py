"""Finds faster settings by trials: makes one change at a time and keeps what is faster beyond the noise of its steps,
then measures the finalists and the base again, in turn.

Invariants (tests/unit/tune/test_tune_search.py):
- the base is tried first, and ends the search where it is not measured;
- a change is kept only where its trial can be told from one of the best so far; all that were not kept are looked at
again after every trial;
- a gain found beside an earlier best is measured anew beside the best at once, one in doubt once with more steps, after
the good guesses and before all others;
- no change is tried twice before the finals but a gain that is measured anew, and no key goes back to a value that it
had;
- while replays are possible, changes of the trained side alone are compared by replayed steps, all others by live ones;
- finalists of the trained side alone are compared by replays of rollouts that the base records for them;
- a trial that fails is a result; after one that was out of memory the next value of the same keys comes first;
- a trial is only started where the longest one so far fits into what is left beside the finals;
- Ctrl-C ends the search, not what is known.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_fuse.compare.intervals import Interval
from verl_fuse.spec.block import key_of
from verl_fuse.tune.candidates import Candidate, holds_longest, too_small
from verl_fuse.tune.lengths import at_equal_lengths
from verl_fuse.tune.order import BETTER, WORSE, Change, changes, guesses
from verl_fuse.tune.pairs import KEPT, between, fastest, gains, paired, sure
from verl_fuse.tune.table import on_trained_side
from verl_fuse.tune.trial import Outcome, Overrides, Trial, merged, same

# A trial that takes so often the base's time, and so many seconds more, hangs.
PATIENCE, FLOOR = 3.0, 60.0
# The most finalists of each turn of the finals; the base is measured beside them.
TURNS = (2, 1)
# Trials of a turn, and those of a gain in doubt, have so many times the steps of the search: at least, and at most,
# where those take half as long as what surrounds them. A replay in doubt has the least: its steps repeat a few.
LONGER = (2, 4)


@dataclass(frozen=True)
class Request:
    """A trial to make: overrides of the base, steps after warm-up, the seconds after which it hangs, whether it replays
    the rollouts that were recorded last, and whether it records its own in their place."""

    overrides: Overrides
    steps: int
    limit: float
    replayed: bool = False
    records: bool = False


class Search:
    """`candidates` returns what may be tried beside overrides of the base, `dependents` what may have to follow them
    (default: the same), `trial` makes a trial; `replays` tells whether rollouts of so many steps are recorded, and is
    asked again before each change. `ratio` predicts after the first trial the seconds a step with its second overrides
    as a share of those with its first, replayed or not (None: not known). `budget` and `clock` are in seconds."""

    def __init__(
        self,
        candidates: Callable[[Overrides], Sequence[Candidate]],
        trial: Callable[[Request], Outcome],
        *,
        steps: int,
        budget: float,
        dependents: Callable[[Overrides], Sequence[Candidate]] | None = None,
        replays: Callable[[int], bool] = lambda steps: False,
        ratio: Callable[[Overrides, Overrides, bool], float | None] = lambda one, other, replayed: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._candidates, self._trial, self._steps, self._clock = candidates, trial, steps, clock
        self._dependents = dependents or candidates
        self._end, self._can_replay, self._replays, self._ratio = clock() + budget, replays, False, ratio
        self._attempts: Counter[str] = Counter()
        self._asked: set[frozenset[tuple[str, str]]] = set()
        # What was kept, the base first: each beside all before it.
        self._kept: list[Overrides] = [()]
        # Changes that were measured, with their ratios to the best beside which they were measured last; those that
        # were measured with more steps.
        self._not_kept: dict[frozenset[tuple[str, str]], tuple[Change, Interval]] = {}
        self._again: set[frozenset[tuple[str, str]]] = set()
        self.trials: list[Trial] = []
        self.interrupted = False

    def run(self) -> None:
        """Make all trials; `trials` has them in their order."""
        try:
            if self._tried((), self._steps, limit=self._left, records=True).measured:
                self._replays = self._can_replay(self._steps)
                # Measures the machine, before the time is shared out.
                self._ratio((), (), False)
                self._climb()
                self._finals()
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def _left(self) -> float:
        return self._end - self._clock()

    @property
    def _longest(self) -> float:
        """Seconds of the longest trial that ended by itself, of the search's length."""
        return max(trial.took for trial in self.trials if trial.outcome.kind != "hung" and not trial.longer)

    @property
    def _final(self) -> float:
        """Seconds that a trial of more steps takes at most, as far as is known."""
        slowest = max(trial.mean for trial in self.trials if trial.measured)
        return self._longest + (self._longer - self._steps) * slowest

    @property
    def _replayed_final(self) -> float:
        """Return the seconds that a replay of the finals takes at most, as far as is known."""
        replays = [trial for trial in self.trials if trial.measured and trial.replayed and not trial.turn]
        if not replays:
            return self._final
        start = max(trial.took - len(trial.outcome.seconds) * trial.mean for trial in replays)
        return start + self._longer * max(trial.mean for trial in replays)

    @property
    def _longer(self) -> int:
        """Steps of a trial that has more of them than the search's: a start costs as much whatever follows it."""
        base, (least, most) = self.trials[0], (times * self._steps for times in LONGER)
        start = base.took - self._steps * base.mean
        return max(least, min(most, int(start / (2 * base.mean))))

    def _tried(
        self,
        overrides: Overrides,
        steps: int,
        *,
        limit: float | None = None,
        replayed: bool = False,
        records: bool = False,
        turn: int = 0,
    ) -> Trial:
        longer = steps > self._steps
        if limit is None:
            more = self._final - self._longest if longer else 0.0
            limit = PATIENCE * (self.trials[0].took + more) + FLOOR
        predicted, begun = self._predicted(overrides, replayed), self._clock()
        outcome = self._trial(Request(overrides, steps, limit, replayed, records))
        self.trials.append(Trial(overrides, outcome, self._clock() - begun, turn, replayed, longer, predicted))
        return self.trials[-1]

    def _predicted(self, overrides: Overrides, replayed: bool) -> float | None:
        """Return the predicted seconds a step, from those of the best so far, or else of the base, as they were
        measured last; None where nothing is predicted."""
        best = self._made_as(self._kept[-1], replayed)
        for start in (best, ()) if overrides else ():
            measured = [trial for trial in self.trials if trial.measured and trial.replayed == replayed]
            alike = [trial for trial in measured if same(trial.overrides, start)]
            if alike and not same(start, overrides):
                share = self._ratio(start, overrides, replayed)
                return None if share is None else alike[-1].mean * share
        return None

    def _climb(self) -> None:
        reserve = self._reserve()
        while True:
            self._replays = self._replays and self._can_replay(self._steps)
            change, steps = self._next(), self._steps
            if again := self._in_doubt(change):
                change = again
                if self._gained(change):
                    self._again.add(_name(change))
                    steps = LONGER[0] * self._steps if self._is_replayed(change) else self._longer
                # Where it is not measured this time it is left.
                del self._not_kept[_name(change)]
            if change is None:
                return
            if not self._stands(change):
                continue
            overrides, replayed = self._changed(change), self._is_replayed(change)
            missing = not self._has_best(steps, replayed)
            if self._left - reserve < (1 + missing) * (self._longest if steps == self._steps else self._final):
                return
            if missing and not self._measured_best(steps, replayed):
                continue
            self._asked.add(_name(change))
            trial = self._tried(self._made_as(overrides, replayed), steps, replayed=replayed)
            if trial.outcome.kind != "out_of_memory":
                self._attempts.update(change.keys)
            if trial.measured:
                self._judge([*(each for each, _ in self._not_kept.values()), change])

    def _judge(self, tried: Sequence[Change]) -> None:
        """Keep the change of the largest gain, if one can be told from noise. Each trial sharpens the look at all."""
        measured = [(change, found) for change in tried if (found := self._gained(change))]
        self._not_kept |= {_name(change): (change, found) for change, found in measured}
        if told := [(found.value, change) for change, found in measured if sure(found)]:
            _, kept = min(told, key=lambda each: each[0])
            del self._not_kept[_name(kept)]
            self._kept.append(self._changed(kept))
            for name, (change, found) in self._not_kept.items():
                # Another value of the same key was measured beside it already.
                self._not_kept[name] = change, self._gained(change) or found

    def _in_doubt(self, change: Change | None) -> Change | None:
        """Return a change to measure anew before the next one: the largest gain that was found beside an earlier best,
        or once there is no good guess left the largest in doubt that was not measured with more steps yet."""
        gained = sorted(
            ((found.value, each) for each, found in self._not_kept.values() if gains(found)), key=lambda each: each[0]
        )
        if earlier := [each for _, each in gained if not self._gained(each)]:
            return earlier[0]
        if change is not None and change.hope == BETTER and not self._times(change):
            return None
        return next((each for _, each in gained if _name(each) not in self._again), None)

    def _gained(self, change: Change) -> Interval | None:
        """Return the ratio of seconds with a change to those of the best so far, None unless both were measured."""
        replayed = self._is_replayed(change)
        best, changed = (self._made_as(each, replayed) for each in (self._kept[-1], self._changed(change)))
        pairs = paired(self.trials, best, changed, replayed=replayed)
        return between(pairs) if pairs else None

    def _reserve(self) -> float:
        """Return the seconds kept for the finals: of all turns, or of one finalist beside the base (which may first be
        recorded for both), where this is at most half of what is left; else of that where a change has room beside it,
        which replays compare with a replay of the base."""
        least = (3, 2) if self._replays else (2,)
        for trials in (sum(TURNS) + len(TURNS) + self._replays, least[0]):
            if trials * self._final <= self._left / 2:
                return trials * self._final
        change = (1 + self._replays) * self._longest
        return next((trials * self._final for trials in least if trials * self._final + change <= self._left), 0.0)

    def _next(self) -> Change | None:
        """Return the next change: what is expected to be slower last; before it the keys tried least often, of these
        what is predicted to save most, then what is expected to be faster, in the order."""
        best = self._kept[-1]
        found = self._candidates(best)
        self._asked |= {frozenset([(each.setting.key, str(each.current))]) for each in found}

        def order(change: Change) -> tuple[bool, int, int, int, int]:
            replayed = self._is_replayed(change)
            before, after = (self._made_as(each, replayed) for each in (best, _beside(best, change)))
            share = self._ratio(before, after, replayed)
            # In parts of a gain that would be kept: less is nothing.
            gain = 0 if share is None else int((1 - share) / (1 - KEPT))
            worse = gain < 0 or (gain == 0 and change.hope == WORSE)
            return worse, self._times(change), -gain, change.hope, change.place

        for change in sorted((each for each in changes(found) if _name(each) not in self._asked), key=order):
            if not self._was_made(change):
                return change
        return None

    def _times(self, change: Change) -> int:
        return max(self._attempts[key] for key in change.keys)

    def _is_replayed(self, change: Change) -> bool:
        return self._replays and all(map(on_trained_side, change.keys))

    def _made_as(self, overrides: Overrides, replayed: bool) -> Overrides:
        """Return what a trial is given: a replayed one leaves out what changes generation alone."""
        return tuple(each for each in overrides if not replayed or on_trained_side(key_of(each)))

    def _was_made(self, change: Change) -> bool:
        replayed = self._is_replayed(change)
        overrides = self._made_as(self._changed(change), replayed)
        return any(trial.replayed == replayed and same(trial.overrides, overrides) for trial in self.trials)

    def _changed(self, change: Change) -> Overrides:
        """Return the overrides of the best so far with a change, and with a value of each key that it brings into play
        and whose own value cannot stay, and of each budget that no longer holds the longest sequence."""
        best = self._kept[-1]
        known, overrides = {each.setting.key for each in self._dependents(best)}, _beside(best, change)
        tried = {each.setting.key for each in self._candidates(overrides)}
        for each in self._dependents(overrides):
            new = each.setting.key not in known and any(key in each.setting.needs for key in change.keys)
            # A budget above all rows stays unless its values are tried.
            stays = each.current in each.values or (each.setting.key not in tried and holds_longest(each))
            if new and not stays:
                overrides = merged(overrides, each.overrides(guesses(each)[0][0]))
            elif least := too_small(each):
                overrides = merged(overrides, each.overrides(least))
        return overrides

    def _stands(self, change: Change) -> bool:
        """Tell whether a change, found beside an earlier best, is one beside the best so far."""
        now = {each.setting.key: each for each in self._candidates(self._kept[-1])}
        return all(
            candidate.setting.key in now and value in now[candidate.setting.key].values
            for candidate, value in change.values
        ) and any(now[candidate.setting.key].current != value for candidate, value in change.values)

    def _has_best(self, steps: int, replayed: bool) -> bool:
        """Tell whether the best so far was measured for so many steps."""
        best, longer = self._made_as(self._kept[-1], replayed), steps > self._steps
        return any(
            (trial.measured, trial.replayed, trial.longer, trial.turn) == (True, replayed, longer, 0)
            for trial in self.trials
            if same(trial.overrides, best)
        )

    def _measured_best(self, steps: int, replayed: bool) -> bool:
        """Measure the best so far, to compare with it. Where that fails, replays are left alone or, where it fails
        live, what was kept last."""
        if self._tried(self._made_as(self._kept[-1], replayed), steps, replayed=replayed).measured:
            return True
        if replayed:
            self._replays = False
        elif len(self._kept) > 1:
            self._kept.pop()
        return False

    def _finals(self) -> None:
        best = self._kept[-1]
        # What was kept comes first: it is sure, and others may be faster by luck alone.
        finalists = [each for each in (best, *fastest(self.trials)) if each]
        finalists = [each for number, each in enumerate(finalists) if not number or not same(each, finalists[0])]
        if self._replays and finalists and _of_trained_side(finalists[0]):
            # What gained nothing beside it on the rollout's side is no reason to generate.
            finalists = [each for each in finalists if _of_trained_side(each)]
        replayed = self._recorded_finals(finalists)
        took = self._replayed_final if replayed else self._final
        for turn, most in enumerate(TURNS, start=1):
            number = min(most, len(finalists))
            if number > 1 and self._left < (sum(TURNS) + len(TURNS)) * took:
                number = 1
            if not number or self._left < (number + 1) * took:
                return
            # Every other turn backwards: a machine that slows down steadily favours nobody.
            order = [(), *finalists[:number]][:: 1 if turn % 2 else -1]
            for overrides in order:
                self._tried(overrides, self._longer, replayed=replayed, turn=turn)
            made = at_equal_lengths(self.trials)[-len(order) :]
            left = sorted((trial for trial in made if trial.measured and trial.overrides), key=lambda each: each.mean)
            finalists = [trial.overrides for trial in left]

    def _recorded_finals(self, finalists: Sequence[Overrides]) -> bool:
        """Record the base with the steps of the finals, where these can replay them: of all that differs between runs
        of the same prompts, lengths differ most."""
        trained = all(map(_of_trained_side, finalists))
        if not (finalists and trained and self._replays) or self._left < self._final + 2 * self._replayed_final:
            return False
        made = self._tried((), self._longer, records=True, turn=1)
        return made.measured and self._can_replay(self._longer)


def _beside(best: Overrides, change: Change) -> Overrides:
    """Return overrides with those of a change."""
    for candidate, value in change.values:
        best = merged(best, candidate.overrides(value))
    return best


def _of_trained_side(overrides: Overrides) -> bool:
    return all(on_trained_side(key_of(override)) for override in overrides)


def _name(change: Change) -> frozenset[tuple[str, str]]:
    return frozenset((candidate.setting.key, str(value)) for candidate, value in change.values)
