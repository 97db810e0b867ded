"""One trial: what was asked, and what became of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from verl_fuse.spec.block import key_of

Kind: TypeAlias = Literal["measured", "out_of_memory", "crashed", "hung", "refused"]
Overrides: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: the seconds of its steps after warm-up, none unless it is measured; a reason unless it
    is; its memory peak on a device in bytes, None where it is not known; of each of those steps the mean and the
    longest response in tokens, none where they are not known."""

    kind: Kind
    seconds: tuple[float, ...] = ()
    reason: str | None = None
    peak_bytes: int | None = None
    lengths: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Trial:
    """A trial of the base with overrides: its seconds in all (`took`), the turn of the finals (0: none), whether its
    steps replayed the base's rollouts instead of generating, whether it had more of them than the base's first, and the
    seconds a step that were predicted before it (None: none were)."""

    overrides: Overrides
    outcome: Outcome
    took: float
    turn: int = 0
    replayed: bool = False
    longer: bool = False
    predicted: float | None = None

    @property
    def measured(self) -> bool:
        return self.outcome.kind == "measured"

    @property
    def mean(self) -> float:
        """Return the mean seconds a step of a trial that is measured."""
        return sum(self.outcome.seconds) / len(self.outcome.seconds)


def same(one: Overrides, other: Overrides) -> bool:
    """Tell whether overrides, each key once, are the same in any order."""
    return set(one) == set(other)


def merged(first: Overrides, then: Overrides) -> Overrides:
    """Return overrides of the base that do what `first` and then `then` do; a key that `first` adds is still added."""
    found = {key_of(override): override for override in first}
    for override in then:
        mark = "++" if found.get(key_of(override), "").startswith("++") else ""
        found[key_of(override)] = mark + override.removeprefix(mark)
    return tuple(found.values())
