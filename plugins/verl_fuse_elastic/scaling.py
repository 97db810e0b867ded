"""Weigh time against cost to find how many replicas pay, from predicted lengths and the measured cost of decoding. Pure
(RLHFless, section on actor scaling).

Invariants (tests/unit/elastic/test_scaling.py):
- the count lies within the limits;
- none of the counts looked at has a lower weighted sum of time and cost, both relative to the most replicas; of equal
  counts the smaller wins;
- the count of the last step stays unless another is better by more than the hysteresis;
- at cost weight 0 no count is faster, at 1 none is cheaper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl_fuse.spec.prompts import Prediction
from verl_fuse_elastic.assignment import Line

CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Terms:
    """The user's terms: `cost_weight` 0 (time only) to 1 (cost only), the least and most replicas, the device-seconds
    that a replica which was not running holds before it generates, and the relative gain for which a change is worth
    it. Above `resident` replicas the missing replicas are created, which takes `launch_seconds` more."""

    cost_weight: float
    least: int
    most: int
    start_seconds: float = 0.0
    hysteresis: float = 0.0
    resident: int = 0
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one count of replicas: seconds until the last replica is done, and replica-seconds until each has
    given its devices back; `starting` of these were held before any replica was generating."""

    count: int
    seconds: float
    replica_seconds: float
    starting: float = 0.0


def forecasts(line: Line, terms: Terms, running: int, *, released: bool) -> list[Forecast]:
    """Return forecasts of the allowed counts, CANDIDATES at most and `running` among them. `running` replicas generated
    the last step; `released`: a replica is free once its own prompts are done."""
    return [forecast(line, count, terms, running, released=released) for count in _counts(terms, running)]


def forecast(
    line: Line,
    count: int,
    terms: Terms,
    running: int,
    *,
    released: bool,
    generated: Mapping[str, Prediction] | None = None,
) -> Forecast:
    """Return the forecast of one count. With the mean and the longest response that were `generated` for each prompt,
    by uid, it is the forecast that had no error of lengths, of the same runs."""
    runs = pairwise(line.cut(count))
    times = [line.seconds(*run) if generated is None else line.afterwards(*run, generated) for run in runs]
    seconds = max(times, default=0.0)
    held = sum(times) if released else count * seconds
    started = max(0, count - running)
    created = max(0, count - max(running, terms.resident))
    starting = terms.start_seconds * started + terms.launch_seconds * created
    return Forecast(count, seconds, held + starting, starting)


def _counts(terms: Terms, running: int) -> list[int]:
    """Return all counts where these are few, else counts in ever larger steps: the difference between 17 and 18
    replicas is not worth a forecast."""
    every = range(terms.least, terms.most + 1)
    if len(every) <= CANDIDATES:
        return list(every)
    ratio = (terms.most / terms.least) ** (1 / (CANDIDATES - 1))
    spread = {math.ceil(terms.least * ratio**n - 1e-9) for n in range(CANDIDATES - 1)}
    return sorted({*spread, terms.most, *({running} & set(every))})


def choose(found: Sequence[Forecast], terms: Terms, running: int) -> Forecast:
    """Return the forecast of the count to run."""
    most = found[-1]

    def objective(forecast: Forecast) -> float:
        time = forecast.seconds / most.seconds if most.seconds else 1.0
        cost = forecast.replica_seconds / most.replica_seconds if most.replica_seconds else 1.0
        return (1 - terms.cost_weight) * time + terms.cost_weight * cost

    best = min(found, key=lambda forecast: (objective(forecast), forecast.count))
    last = next((forecast for forecast in found if forecast.count == running), None)
    if last is not None and objective(best) > (1 - terms.hysteresis) * objective(last):
        return last
    return best
