"""Finds faster settings by trials: changes one setting at a time and keeps what is faster, then measures the finalists
and the base again, in turn.

Invariants (tests/unit/tune/test_tune_search.py):
- the base is tried first, and ends the search where it is not measured;
- no configuration is tried twice before the finals, and no value of a key twice, the base's included;
- a trial that fails is a result; after one that was out of memory the next value of the same key comes first;
- a trial is only started where the longest one so far fits into what is left beside the finals;
- Ctrl-C ends the search, not what is known.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from verl_fuse.tune.candidates import Candidate
from verl_fuse.tune.order import guesses, rank
from verl_fuse.tune.setting import Value

Kind: TypeAlias = Literal["measured", "out_of_memory", "crashed", "hung", "refused"]
Overrides: TypeAlias = tuple[str, ...]

# A change is kept where steps take this share of the best so far or less: smaller gains are lost in noise, and each
# would be one line more to paste.
KEPT = 0.98
# A trial that takes so often the base's time, and so many seconds more, hangs.
PATIENCE, FLOOR = 3.0, 60.0
# The most finalists of each turn of the finals; the base is measured beside them. Trials of a turn have so many times
# the steps of the search.
TURNS, LONGER = (2, 1), 2


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: the seconds of its steps after warm-up, none unless it is measured; a reason unless it
    is; its memory peak on a device in bytes, None where it is not known."""

    kind: Kind
    seconds: tuple[float, ...] = ()
    reason: str | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Trial:
    """A trial of the base with overrides: its seconds in all (`took`), and the turn of the finals (0: none)."""

    overrides: Overrides
    outcome: Outcome
    took: float
    turn: int = 0

    @property
    def measured(self) -> bool:
        return self.outcome.kind == "measured"

    @property
    def mean(self) -> float:
        """Return the mean seconds a step of a trial that is measured."""
        return sum(self.outcome.seconds) / len(self.outcome.seconds)


def faster(trial: Trial, than: Trial) -> bool:
    """Tell whether a trial was measured, and to be faster by enough to be kept."""
    return trial.measured and trial.mean <= KEPT * than.mean


def fastest(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of the search that were faster than the base, which is the first, the fastest first."""
    return sorted(
        (each for each in trials[1:] if not each.turn and faster(each, trials[0])), key=lambda each: each.mean
    )


def merged(first: Overrides, then: Overrides) -> Overrides:
    """Return overrides of the base that do what `first` and then `then` do; a key that `first` adds is still added."""
    found = {_key(override): override for override in first}
    for override in then:
        mark = "++" if found.get(_key(override), "").startswith("++") else ""
        found[_key(override)] = mark + override.removeprefix(mark)
    return tuple(found.values())


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


class Search:
    """`candidates` returns what may be tried beside overrides of the base, `trial` makes one: (overrides, steps after
    warm-up, seconds after which it hangs). `budget` and `clock` are in seconds."""

    def __init__(
        self,
        candidates: Callable[[Overrides], Sequence[Candidate]],
        trial: Callable[[Overrides, int, float], Outcome],
        *,
        steps: int,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._candidates, self._trial, self._steps, self._clock = candidates, trial, steps, clock
        self._end = clock() + budget
        self._attempts: Counter[str] = Counter()
        self._asked: list[tuple[str, Value]] = []
        self.trials: list[Trial] = []
        self.interrupted = False

    def run(self) -> None:
        """Make all trials; `trials` has them in their order."""
        try:
            if self._tried((), self._steps, self._left).measured:
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
        return max(trial.took for trial in self.trials if trial.outcome.kind != "hung" and not trial.turn)

    @property
    def _final(self) -> float:
        """Seconds that a trial of the finals takes at most, as far as is known."""
        return self._longest + (LONGER - 1) * self._steps * max(trial.mean for trial in self.trials if trial.measured)

    def _tried(self, overrides: Overrides, steps: int, limit: float, turn: int = 0) -> Trial:
        begun = self._clock()
        outcome = self._trial(overrides, steps, limit)
        self.trials.append(Trial(overrides, outcome, self._clock() - begun, turn))
        return self.trials[-1]

    def _climb(self) -> None:
        best = base = self.trials[0]
        reserve = self._reserve()
        while self._left >= self._longest + reserve and (change := self._next(best.overrides)) is not None:
            key, value, overrides = change
            self._asked.append((key, value))
            trial = self._tried(overrides, self._steps, PATIENCE * base.took + FLOOR)
            if trial.outcome.kind != "out_of_memory":
                self._attempts[key] += 1
            if faster(trial, best):
                best = trial

    def _reserve(self) -> float:
        """Return the seconds kept for the finals: of all turns, or of one finalist beside the base, where this is at
        most half of what is left; less where not even that and one change fit."""
        for trials in (sum(TURNS) + len(TURNS), 2):
            if trials * self._final <= self._left / 2:
                return trials * self._final
        return 2 * self._final if 2 * self._final + self._longest <= self._left else 0.0

    def _next(self, best: Overrides) -> tuple[str, Value, Overrides] | None:
        """Return the next change (key, value, all overrides): a value of the key tried least often, of these the first
        in the order."""
        found = self._candidates(best)
        self._asked += [(each.setting.key, each.current) for each in found]
        for candidate in sorted(found, key=lambda each: (self._attempts[each.setting.key], rank(each.setting.key))):
            for value in guesses(candidate):
                if (candidate.setting.key, value) in self._asked:
                    continue
                overrides = self._changed(best, candidate, value, found)
                if all(set(trial.overrides) != set(overrides) for trial in self.trials):
                    return candidate.setting.key, value, overrides
        return None

    def _changed(self, best: Overrides, candidate: Candidate, value: Value, before: Sequence[Candidate]) -> Overrides:
        """Return the overrides with a change, and with a value of each key that it brings into play and whose own value
        cannot stay."""
        overrides, known = merged(best, candidate.overrides(value)), {each.setting.key for each in before}
        for each in self._candidates(overrides):
            new = candidate.setting.key in each.setting.needs and each.setting.key not in known
            if new and each.current not in each.values:
                overrides = merged(overrides, each.overrides(guesses(each)[0]))
        return overrides

    def _finals(self) -> None:
        finalists, base = [trial.overrides for trial in fastest(self.trials)], self.trials[0]
        for turn, most in enumerate(TURNS, start=1):
            number = min(most, len(finalists))
            if number > 1 and self._left < (sum(TURNS) + len(TURNS)) * self._final:
                number = 1
            if not number or self._left < (number + 1) * self._final:
                return
            # Every other turn backwards: a machine that slows down steadily favours nobody.
            order = [base.overrides, *finalists[:number]][:: 1 if turn % 2 else -1]
            limit = PATIENCE * (base.took + self._final - self._longest) + FLOOR
            made = [self._tried(overrides, LONGER * self._steps, limit, turn) for overrides in order]
            left = sorted((trial for trial in made if trial.measured and trial.overrides), key=lambda each: each.mean)
            finalists = [trial.overrides for trial in left]
