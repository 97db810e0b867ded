"""Estimates seconds and bytes of generation under a layout, by simulated continuous batching on drawn lengths."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.model import Batch
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.workload import Workload

# A rollout engine admits no more sequences at once; beyond that decoding only gets slower.
MOST_RUNNING = 1024
SEED = 0


@dataclass(frozen=True)
class GenerationEstimates:
    """The estimates that belong to the generation call of a workload. Every layout is timed on the same drawn lengths,
    so that layouts compare fairly."""

    workload: Workload
    cost: AnalyticCost

    @cached_property
    def requests(self) -> Requests:
        rng, w = np.random.default_rng(SEED), self.workload
        prompts = np.repeat(w.prompt.sample(rng, w.prompts), w.samples)
        return Requests.of(prompts, w.response.sample(rng, w.sequences))

    @cached_property
    def longest(self) -> int:
        return int(self.requests.tokens.max())

    @cached_property
    def _timings(self) -> dict[Layout, ReplicaTiming]:
        return {}

    def kv_tokens(self, layout: Layout, waves: int) -> int:
        """Return the KV capacity of a replica that holds 1/waves of its sequences at once, and at least the longest
        sequence."""
        tokens = self.requests.tokens
        share = max(int(tokens[queue].sum()) for queue in round_robin(len(tokens), layout.dp))
        return max(self.longest, -(-share // waves))

    def seconds(self, layout: Layout, waves: int) -> float:
        """Return the seconds from the start to the last finished sample, with that KV capacity on every replica."""
        timing = replace(self._timing(layout), kv_capacity=self.kv_tokens(layout, waves))
        return RolloutState.begin(self.requests, timing, round_robin(len(self.requests), layout.dp)).advance().seconds

    def _timing(self, layout: Layout) -> ReplicaTiming:
        replica = replace(layout, dp=1) if layout.ep == 1 else layout
        if replica not in self._timings:
            model, cost = self.workload.actor, self.cost
            self._timings[replica] = ReplicaTiming.build(
                lambda sequences, context: cost.decode(model, layout, sequences, context),
                lambda sequences, each: cost.prefill(model, layout, Batch.equal(sequences, each)),
                max_batch=min(MOST_RUNNING, len(self.requests)),
                kv_capacity=self.longest,
                longest=self.longest,
            )
        return self._timings[replica]
