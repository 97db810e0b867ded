"""Decide how many replicas generate each step of a run, and keep the forecast of the step.

Invariants (tests/unit/elastic/test_scaler.py):
- before decoding was measured, and without a prediction for every prompt, all existing replicas generate, within the
  block's limits;
- a step that asks for more prompts is foretold as if all had been there at its begin;
- a step for which nothing was foretold has no metrics;
- the replica-seconds that a step took beyond its forecast are added, per sample, to the forecast of the next step.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import ReplicaView
from verl_fuse_elastic.assignment import Line, fewest_slots
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.learned import ElasticHistory
from verl_fuse_elastic.ledger import Ledger
from verl_fuse_elastic.scaling import Forecast, Terms, choose, forecast, forecasts
from verl_fuse_elastic.unforetold import Unforetold

logger = logging.getLogger(__name__)


class Scaler:
    """The choice of the replica count; `replicas` generated the step before the first one, and a response has at most
    `limit` tokens."""

    def __init__(self, block: ElasticConfig, replicas: int, limit: float) -> None:
        self._block, self._running, self._limit = block, replicas, limit
        self._foretell: Callable[[Sequence[Prompt]], Forecast] | None = None
        self._forecast, self._seconds = None, 0.0
        self._unforetold, self._held, self._samples = Unforetold(), 0.0, 0

    def begin_step(self) -> None:
        """Forget the forecast of the last step, and learn from its outcome."""
        if self._forecast is not None and self._held:
            foretold = self._forecast.replica_seconds - self._forecast.starting
            self._unforetold.learn(foretold, self._held, self._samples)
        self._held = 0.0
        self._foretell = self._forecast = None

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
            each = self._unforetold.each or 0.0
            line = partial(Line, slots=fewest_slots(replicas), cost=decode, limit=self._limit, each=each)
            count = choose(forecasts(line(prompts), terms, running, released=release), terms, running).count
            # Missing replicas are created while this step runs on the existing ones.
            there = min(count, len(replicas))
            self._foretell = lambda prompts: forecast(line(prompts), there, terms, running, released=release)
            self._forecast = self._foretell(prompts)
            self._samples = sum(prompt.samples for prompt in prompts)
        self._running = count
        self._seconds = time.perf_counter() - begun
        return count

    def extend(self, prompts: Iterable[Prompt]) -> None:
        """Foretell the step anew when the step has asked for more prompts: `prompts` are all of its prompts."""
        if self._foretell is not None:
            known = [prompt for prompt in prompts if prompt.prediction is not None]
            self._forecast, self._samples = self._foretell(known), sum(prompt.samples for prompt in known)

    def metrics(self, step: int, spent: Ledger, replicas: int, devices: int) -> dict[str, float]:
        """Return the forecast of a step and its outcome, on some of `replicas` with `devices` each."""
        if self._forecast is None:
            return {}
        self._held = spent.held
        logger.info(
            "step %d: %d of %d replicas; generation %.2f s predicted, %.2f s measured; "
            "replica-seconds held %.2f predicted, %.2f measured",
            step, self._forecast.count, replicas, self._forecast.seconds, spent.seconds,
            self._forecast.replica_seconds, spent.held,
        )  # fmt: skip
        return {
            "fuse/elastic_predicted_seconds": self._forecast.seconds,
            "fuse/elastic_seconds": spent.seconds,
            "fuse/elastic_predicted_device_seconds": devices * self._forecast.replica_seconds,
            "fuse/elastic_device_seconds": devices * spent.held,
            "fuse/elastic_decision_seconds": self._seconds,
        }
