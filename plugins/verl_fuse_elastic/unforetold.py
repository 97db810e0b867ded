"""Learn the seconds of a step beside decoding from the errors of forecasts. Pure.

Prefill above all grows with the samples that a replica gets, so a forecast of decoding alone flatters few replicas more
than many. The error is taken from replica-seconds, of all replicas together: the time of the slowest depends more on
its longest response than on its samples.

Invariants (tests/unit/elastic/test_unforetold.py):
- where every sample costs its replica the same seconds beside decoding, forecasts are right from the second step on,
  for any number of replicas;
- the seconds are never below 0: a forecast that was too long tells nothing about the work beside decoding;
- one strange step changes the seconds by less than half of the error of its forecast.
"""

from dataclasses import dataclass

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
