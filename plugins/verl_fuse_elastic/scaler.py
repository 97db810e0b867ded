"""Decide how many replicas generate each step of a run, and keep the forecast of the step.

Invariants (tests/unit/elastic/test_scaler.py):
- before decoding was measured, and without a prediction for every prompt, all existing replicas generate, within the
  block's limits;
- a step that asks for more prompts is foretold as if all had been there at its begin;
- a step for which nothing was foretold has no metrics;
- the replica-seconds that a step took beyond its forecast are added, per sample, to the next ones;
- a number of replicas is left if its steps exceed their forecasts by more than another number's steps do;
- a forecast that misses because of wrong lengths teaches nothing but lengths.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import ReplicaView
from verl_fuse_elastic.assignment import Line, fewest_slots
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.corrections import Corrections
from verl_fuse_elastic.learned import ElasticHistory
from verl_fuse_elastic.ledger import Ledger
from verl_fuse_elastic.scaling import Forecast, Terms, choose, forecast, forecasts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Foretold:
    """The corrected forecast of one step, and its number of samples. `afterwards` makes the model's forecast by the
    lengths that were generated, and by seconds for each sample."""

    expected: Forecast
    samples: int
    afterwards: Callable[[Mapping[str, Prediction], float], Forecast]


class Scaler:
    """The choice of the replica count; `replicas` generated the step before the first one, and a response has at most
    `limit` tokens."""

    def __init__(self, block: ElasticConfig, replicas: int, limit: float) -> None:
        self._block, self._running, self._limit = block, replicas, limit
        self._foretell: Callable[[Sequence[Prompt]], _Foretold] | None = None
        self._foretold: _Foretold | None = None
        self._spent: Ledger | None = None
        self._seconds = 0.0
        self._generated: Mapping[str, Prediction] = {}

    def begin_step(self) -> None:
        """Forget the last step's forecast and outcome."""
        self._foretell = self._foretold = self._spent = None
        self._generated = {}

    def end_step(self, corrections: Corrections) -> None:
        """Learn from the outcome of the step, once its metrics are made."""
        if self._foretold is not None and self._spent is not None and self._generated:
            afterwards = partial(self._foretold.afterwards, self._generated)
            corrections.learn(afterwards, self._foretold.samples, self._spent.seconds, self._spent.held)

    def decide(
        self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int, learned: ElasticHistory
    ) -> int:
        """Return how many replicas generate these prompts, of `replicas` and of missing ones up to `most`."""
        begun = time.perf_counter()
        block, resident = self._block, sum(not replica.standalone for replica in replicas)
        most = min(most, block.max_replicas or most)
        least = min(block.min_replicas, most) if block.scale else most
        terms = Terms(
            block.cost_weight,
            least,
            most,
            block.start_seconds,
            block.hysteresis,
            resident,
            learned.launch_seconds,
        )
        count = max(least, min(len(replicas), most))
        decode, running, release = learned.decode, self._running, block.release
        if decode is not None and prompts and all(prompt.prediction is not None for prompt in prompts):
            each, outcomes = learned.corrections.unforetold.seconds, learned.corrections.outcomes
            line = partial(Line, slots=fewest_slots(replicas), cost=decode, limit=self._limit)
            found = forecasts(line(prompts, each=each), terms, running, released=release)
            count = choose([outcomes.hoped(one) for one in found], terms, running).count
            # Missing replicas are created while this step runs on the existing ones.
            there = min(count, len(replicas))

            def foretell(prompts: Sequence[Prompt]) -> _Foretold:
                one = partial(forecast, count=there, terms=terms, running=running, released=release)

                def afterwards(generated: Mapping[str, Prediction], each: float) -> Forecast:
                    return one(line(prompts, each=each), generated=generated)

                samples = sum(prompt.samples for prompt in prompts)
                return _Foretold(outcomes.expected(one(line(prompts, each=each))), samples, afterwards)

            self._foretell, self._foretold = foretell, foretell(prompts)
        self._running = count
        self._seconds = time.perf_counter() - begun
        return count

    def extend(self, prompts: Iterable[Prompt]) -> None:
        """Foretell the step anew when the step has asked for more prompts: `prompts` are all of its prompts."""
        if self._foretell is not None:
            self._foretold = self._foretell([prompt for prompt in prompts if prompt.prediction is not None])

    def generated(self, prompts: Iterable[Prompt]) -> None:
        """Take in the lengths of the step: the prediction of each of `prompts` is the mean and the longest of its
        responses now."""
        self._generated = {prompt.uid: prompt.prediction for prompt in prompts if prompt.prediction is not None}

    def metrics(self, step: int, spent: Ledger, replicas: int, devices: int) -> dict[str, float]:
        """Return the forecast of a step and its outcome, on some of `replicas` with `devices` each."""
        if self._foretold is None:
            return {}
        self._spent, foretold = spent, self._foretold.expected
        logger.info(
            "step %d: %d of %d replicas; generation %.2f s predicted, %.2f s measured; "
            "replica-seconds held %.2f predicted, %.2f measured",
            step, foretold.count, replicas, foretold.seconds, spent.seconds, foretold.replica_seconds, spent.held,
        )  # fmt: skip
        return {
            "fuse/elastic_predicted_seconds": foretold.seconds,
            "fuse/elastic_seconds": spent.seconds,
            "fuse/elastic_predicted_device_seconds": devices * foretold.replica_seconds,
            "fuse/elastic_device_seconds": devices * spent.held,
            "fuse/elastic_decision_seconds": self._seconds,
        }
