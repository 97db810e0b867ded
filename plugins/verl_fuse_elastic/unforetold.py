"""Seconds of a step beside decoding, learned from the errors of forecasts. Pure.

Prefill above all grows with the samples a replica gets, so a forecast of decoding alone flatters few replicas more than
many. The error is taken from replica-seconds, of all replicas together: the time of the slowest says more of
its longest response than of its samples.

Invariants (tests/unit/elastic/test_unforetold.py):
- where every sample costs its replica the same seconds beside decoding, forecasts are right from the second one on,
  for any number of replicas;
- it is never below 0: a forecast that was too long says nothing of what it left out;
- one strange step changes it by less than the half of what it was wrong by.
"""

from dataclasses import dataclass

# Of what the newest step was wrong by, where there were earlier ones.
NEWEST_REST = 0.4


@dataclass
class Unforetold:
    """Seconds of a replica for each of its samples, beside decoding; None before a step was foretold."""

    each: float | None = None

    def learn(self, foretold: float, held: float, samples: int) -> None:
        """A step of so many samples took `held` replica-seconds, where `foretold` were foretold with what was known."""
        known = self.each or 0.0
        weight = 1.0 if self.each is None else NEWEST_REST
        self.each = max(0.0, known + weight * (held - foretold) / samples)
