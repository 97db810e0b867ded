"""Correct forecasts by outcomes of earlier steps: by seconds of each sample beside decoding (`unforetold.py`), and by a
miss that depends on the number of replicas (`outcomes.py`). Pure.

Invariants (tests/unit/elastic/test_corrections.py, test_learned.py):
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
from verl_fuse_elastic.unforetold import Unforetold


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
