"""`migration_threshold: auto`: R_t and the survivors by simulating the next rollout on recent lengths, with costs measured in earlier steps.

Invariants (tests/unit/interstage/test_auto.py):
- before a step has been measured, and wherever no gain is predicted, nothing migrates;
- data sets are kept apart, and recent steps count more: the lengths of a data set's step `age` before its last one are drawn with weight DECAY ** age.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from verl_fuse.simulate.rollout import Requests
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.simulate.threshold import Threshold, best_threshold
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_interstage.learned import InterstageHistory
from verl_fuse_interstage.measured import InferenceCost

DECAY = 0.7
DRAWN_BATCHES = 2


class AutoThreshold:
    """Learns from each step's timeline and chooses for the next one. A replica's engine has `capacity`; `longest` is
    prompt plus response."""

    def __init__(self, replicas: int, capacity: Capacity, longest: int):
        self._replicas, self._capacity, self._longest = replicas, capacity, longest
        self.learned = InterstageHistory()
        self._rng = np.random.default_rng(0)
        self.decision_seconds = 0.0

    def warm_up(self) -> None:
        """Compile what a choice runs, so that the first one does not wait for it."""
        timing = self._timing(DecodeCost(1.0, 0.0), InferenceCost(1.0, 0.0))
        best_threshold([Requests.of(np.ones(8, np.int64), np.arange(1, 9))], 2, timing, InferenceWork(1.0))

    def learn(self, timeline: Timeline, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Take in a finished step: its timeline, and (prompt, response) tokens of its samples by data set."""
        self.learned.learn(timeline, lengths, self._replicas, self._capacity)

    def choose(self, samples: Mapping[str, int]) -> Threshold | None:
        """The threshold for a step of so many samples of each data set; None before anything was measured."""
        begun = time.perf_counter()
        known = self.learned
        if known.decode is None or known.inference is None or not known.lengths:
            return None
        draws = [self._draw(samples) for _ in range(DRAWN_BATCHES)]
        inference = InferenceWork(known.inference.per_token, last_seconds=known.inference.group)
        timing = self._timing(known.decode, known.inference)
        chosen = best_threshold(draws, self._replicas, timing, inference, MigrationCost(known.migration))
        self.decision_seconds = time.perf_counter() - begun
        return chosen

    def _draw(self, samples: Mapping[str, int]) -> Requests:
        """As many requests, in random order; one of a data set not seen yet is like any seen."""
        parts = []
        for source, count in samples.items():
            lengths = self.learned.lengths
            seen = [lengths[source]] if source in lengths else list(lengths.values())
            steps = [(rows, DECAY**age / len(rows)) for history in seen for age, rows in enumerate(history)]
            weights = np.concatenate([np.full(len(rows), weight) for rows, weight in steps])
            chosen = self._rng.choice(len(weights), size=count, p=weights / weights.sum())
            parts.append(np.concatenate([rows for rows, _ in steps])[chosen])
        drawn = self._rng.permutation(np.concatenate(parts))
        return Requests.of(drawn[:, 0], np.maximum(drawn[:, 1], 1))

    def _timing(self, decode: DecodeCost, inference: InferenceCost) -> ReplicaTiming:
        # A prefill is a forward pass of the policy; inference passes each token through all models, so this is on the careful side.
        return ReplicaTiming.build(
            lambda sequences, context: decode.step + decode.sequence * sequences,
            lambda sequences, tokens: decode.step + inference.per_token * sequences * tokens,
            max_batch=self._capacity.sequences,
            kv_capacity=max(self._longest, int(min(self._capacity.tokens, self._capacity.sequences * self._longest))),
            longest=self._longest,
        )
