"""Simulates requests on replicas: the state of a running rollout, which one replica after another advances.

Invariants (tests/unit/simulate/test_rollout.py):
- every request is in exactly one queue, and finishes exactly once;
- `at` and then `advance` end as if the rollout had run through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.simulate.replica_kernel import advance_all
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints

FOREVER = float("inf")


@dataclass(frozen=True, eq=False)
class Requests:
    """One row per sample: prompt and response tokens, and how much of the prompt another sample of its group has
    already prefilled."""

    prompt: Ints
    response: Ints
    cached: Ints

    @classmethod
    def of(cls, prompt: Ints, response: Ints, cached: Ints | None = None) -> "Requests":
        """Make requests from arrays of equal length; responses have at least one token."""
        prompt, response = (np.ascontiguousarray(values, np.int64) for values in (prompt, response))
        if len(prompt) != len(response) or len(response) == 0:
            raise FuseError(
                f"{len(prompt)} prompts and {len(response)} responses; needs as many of each, and at least one"
            )
        if response.min() < 1 or prompt.min() < 0:
            raise FuseError(
                f"response lengths from {response.min()}, prompt lengths from {prompt.min()}; needs >= 1 and >= 0"
            )
        return cls(prompt, response, np.zeros_like(prompt) if cached is None else np.asarray(cached, np.int64))

    def __len__(self) -> int:
        return len(self.response)

    @property
    def tokens(self) -> Ints:
        """Return prompt plus response tokens, per sample."""
        return self.prompt + self.response


@dataclass(frozen=True, eq=False)
class RolloutState:
    """The state of a rollout at one moment. Replica r serves `queues[offsets[r]:offsets[r + 1]]` in this order; seconds
    count from the rollout's start."""

    requests: Requests
    timing: ReplicaTiming
    queues: Ints
    offsets: Ints
    heads: Ints
    clocks: Floats
    busy: Floats
    done: Ints
    cached: Ints
    arrival: Floats
    finish: Floats

    @classmethod
    def begin(cls, requests: Requests, timing: ReplicaTiming, queues: Sequence[Ints]) -> "RolloutState":
        """Begin a rollout: all requests are there from the start; `queues` lists the requests of each replica."""
        count, replicas = len(requests), len(queues)
        flat = np.concatenate([np.asarray(queue, np.int64) for queue in queues])
        if len(flat) != count or not np.array_equal(np.sort(flat), np.arange(count)):
            raise FuseError(f"queues hold {len(flat)} entries for {count} requests; needs each request in one queue")
        longest = int(requests.tokens.max())
        if longest > timing.kv_capacity:
            raise FuseError(f"a sequence of {longest} tokens exceeds the replica's KV capacity of {timing.kv_capacity}")
        offsets = np.concatenate([[0], np.cumsum([len(queue) for queue in queues])]).astype(np.int64)
        return cls(
            requests, timing, flat, offsets, np.zeros(replicas, np.int64), np.zeros(replicas), np.zeros(replicas),
            np.zeros(count, np.int64), requests.cached.copy(), np.zeros(count), np.full(count, np.nan),
        )  # fmt: skip

    @property
    def replicas(self) -> int:
        return len(self.heads)

    @property
    def seconds(self) -> float:
        """Return the time at which the last request finished; NaN while a request has not finished."""
        return float(self.finish.max())

    @property
    def replica_of(self) -> Ints:
        """Return the replica in whose queue each request stands; -1 for a request that finished before the others were
        moved."""
        result = np.full(len(self.requests), -1)
        result[self.queues] = np.repeat(np.arange(self.replicas), np.diff(self.offsets))
        return result

    def queue(self, replica: int) -> Ints:
        return self.queues[self.offsets[replica] : self.offsets[replica + 1]]

    def advance(self, until: float = FOREVER) -> "RolloutState":
        """Run every replica to its first step boundary at or after `until`."""
        t, names = self.timing, ("heads", "clocks", "busy", "done", "cached", "finish")
        later = replace(self, **{name: getattr(self, name).copy() for name in names})
        advance_all(
            later.queues, later.offsets, later.heads, later.clocks, later.busy, until,
            later.requests.prompt, later.requests.response, later.done, later.cached, later.arrival, later.finish,
            t.decode, t.integral, t.spacing, t.prefill_tokens, t.prefill_seconds, t.request_seconds, t.square_seconds,
            t.max_batch, t.kv_capacity, t.prefill_budget,
        )  # fmt: skip
        return later


def round_robin(count: int, replicas: int) -> list[Ints]:
    """Deal a batch as verl's load balancer does: each request to the replica with the fewest requests
    (verl/workers/rollout/llm_server.py)."""
    return [np.arange(replica, count, replicas) for replica in range(replicas)]
