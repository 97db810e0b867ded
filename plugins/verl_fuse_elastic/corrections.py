"""Correct forecasts by outcomes of earlier steps: by seconds of each sample beside decoding, and by a miss that depends
on the number of replicas (`outcomes.py`). Pure.

Prefill above all grows with the samples that a replica gets, so a forecast of decoding alone flatters few replicas more
than many. The error is taken from replica-seconds, of all replicas together: the time of the slowest depends more on
its longest response than on its samples.

Invariants (tests/unit/elastic/test_corrections.py, test_unforetold.py, test_learned.py):
- where every sample costs its replica the same seconds beside decoding, forecasts are right from the second step on,
  for any number of replicas;
- these seconds are never below 0: a forecast that was too long tells nothing about the work beside decoding;
- one strange step changes them by less than half of the error of its forecast;
- each of the two learns from the part that the other leaves unexplained: together they foretell a step right that both
  could explain;
- the data written with a checkpoint makes the corrections in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_fuse.spec.kept import amount
from verl_fuse_elastic.outcomes import Outcomes
from verl_fuse_elastic.scaling import Forecast

# The share of the newest step's error that is taken in, where there were earlier steps.
NEWEST_REST = 0.4


@dataclass
class Unforetold:
    """`seconds` of a replica for each of its samples, beside decoding; `known` once a step was foretold."""

    seconds: float = 0.0
    known: bool = False

    def learn(self, foretold: float, held: float, samples: int) -> None:
        """Take in a step of `samples` samples that took `held` replica-seconds, where its forecast was `foretold`."""
        weight = NEWEST_REST if self.known else 1.0
        self.seconds = max(0.0, self.seconds + weight * (held - foretold) / samples)
        self.known = True


@dataclass
class Corrections:
    """The corrections of all forecasts of a run."""

    unforetold: Unforetold = field(default_factory=Unforetold)
    outcomes: Outcomes = field(default_factory=Outcomes)

    def learn(self, afterwards: Callable[[float], Forecast], samples: int, taken: float, held: float) -> None:
        """Take in a step of `samples` samples that took `taken` seconds and `held` replica-seconds. `afterwards` makes
        the forecast by the lengths that were generated, from the seconds of a sample beside decoding."""
        model = afterwards(self.unforetold.seconds)
        even = self.outcomes.without_slope(model.count, held)
        self.unforetold.learn(model.replica_seconds - model.starting, even, samples)
        self.outcomes.learn(afterwards(self.unforetold.seconds), taken, held)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return {"each": self.unforetold.seconds if self.unforetold.known else None, "outcomes": self.outcomes.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Corrections":
        """Return the corrections that `data` was written from. Raises the errors that `Kept.parse` may raise on
        anything else."""
        each = data["each"]
        unforetold = Unforetold() if each is None else Unforetold(amount(each), known=True)
        return cls(unforetold, Outcomes.from_dict(data["outcomes"]))
