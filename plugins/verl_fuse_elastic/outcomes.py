"""Learn from the outcomes of steps what each number of replicas takes, where forecasts of decoding miss it. Pure.

Replicas share more than the cost of one replica's decoding tells: cores and memory of a host, and the processes that
send requests and take samples. More replicas may be slower for that, or less fast.

Invariants (tests/unit/elastic/test_outcomes.py):
- a number of replicas whose forecasts miss by a constant factor is foretold right from its second step on;
- a number that never ran is foretold by the model, and for a choice it has the benefit of the doubt: it is as much
  better as the last forecasts missed by;
- one strange step changes a known factor by less than half of its error;
- a number that has not run for long is forgotten, so that it may be tried again.
"""

from dataclasses import dataclass, field, replace

from verl_fuse_elastic.scaling import Forecast

# The share of the newest step's error that is taken in, where that number of replicas ran before.
NEWEST_OUTCOME = 0.4
# A number that never ran is hoped to be better by this share at most.
HOPE = 0.3
# A number is forgotten after so many steps of other numbers.
FORGOTTEN_AFTER = 50


@dataclass(frozen=True, slots=True)
class _Factors:
    """Measured over foretold seconds, the same of replica-seconds, and the step in which they were last measured."""

    seconds: float
    held: float
    step: int


@dataclass
class Outcomes:
    """The factors of each number of replicas, over forecasts of decoding alone. `doubt`: the share of the seconds by
    which the last forecasts missed."""

    doubt: float = 0.0
    _factors: dict[int, _Factors] = field(default_factory=dict)
    _steps: int = 0

    def learn(self, decoding: Forecast, seconds: float, held: float, said: float) -> None:
        """Take in a step that took `seconds` and `held` replica-seconds, where `decoding` is the forecast of its
        decoding alone, and `said` are the seconds that were foretold."""
        working = decoding.replica_seconds - decoding.starting
        if min(decoding.seconds, working, seconds, held, said) <= 0:
            return
        weight = NEWEST_OUTCOME if self._steps else 1.0
        self.doubt += weight * (min(HOPE, abs(seconds / said - 1)) - self.doubt)
        self._steps += 1
        known = self._factors.get(decoding.count)
        old, weight = (known, NEWEST_OUTCOME) if known is not None else (_Factors(0.0, 0.0, 0), 1.0)
        self._factors[decoding.count] = _Factors(
            old.seconds + weight * (seconds / decoding.seconds - old.seconds),
            old.held + weight * (held / working - old.held),
            self._steps,
        )
        last = self._steps - FORGOTTEN_AFTER
        self._factors = {count: one for count, one in self._factors.items() if one.step > last}

    def expected(self, decoding: Forecast, model: Forecast) -> Forecast:
        """Return what a number of replicas will take: its forecast of decoding, corrected, or that of the `model` where
        the number never ran."""
        known = self._factors.get(decoding.count)
        return model if known is None else _scaled(decoding, known.seconds, known.held)

    def hoped(self, decoding: Forecast, model: Forecast) -> Forecast:
        """Return what a number of replicas is chosen by."""
        expected = self.expected(decoding, model)
        return expected if decoding.count in self._factors else _scaled(expected, 1 - self.doubt, 1 - self.doubt)


def _scaled(forecast: Forecast, of_seconds: float, of_held: float) -> Forecast:
    working = forecast.replica_seconds - forecast.starting
    return replace(
        forecast, seconds=of_seconds * forecast.seconds, replica_seconds=of_held * working + forecast.starting
    )
