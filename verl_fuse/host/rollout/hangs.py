"""Finds replicas that have requests but stand still, and ends them, so that their requests fail
and start again elsewhere.

A client cannot tell a hung replica from a slow one: an answer comes at the end. The server can: it knows how many
tokens each of its requests has. It is asked now and then, and nobody waits for its answer.

Invariants (tests/integration/test_replicas.py):
- a replica is hung once nothing about its requests has changed, or it has not answered, for `timeout` seconds in
  which it always had some;
- one that generates, however slowly, or whose engine does not say, is never called hung, nor one with so many requests
  that a question waits behind them;
- time in which nobody looked, as between two steps, does not count;
- looking takes no longer when a replica hangs.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl_fuse.host.rollout.replica import Replica
from verl_fuse.host.upstream.vllm import generated

# Seconds between two questions, at most.
INTERVAL = 10.0


@dataclass(slots=True)
class _Seen:
    """A replica's requests in flight and last answer, and since when nothing of that has changed."""

    requests: int
    since: float
    answer: Any = None


class HangWatch:
    """Watches the servers of `replicas`, by rank; which there are may change."""

    def __init__(self, replicas: Mapping[int, Replica], timeout: float):
        self._replicas, self._timeout = replicas, timeout
        self._interval = min(INTERVAL, timeout / 5)
        self._next, self._looked = 0.0, time.monotonic()
        self._asked: dict[int, ray.ObjectRef] = {}
        self._seen: dict[int, _Seen] = {}

    def hung(self, requests: Mapping[int, int]) -> list[int]:
        """The hung replicas, of those that have requests in flight: how many."""
        now = time.monotonic()
        unseen, self._looked = max(0.0, now - self._looked - self._interval), now
        self._seen = {rank: self._seen.get(rank) or _Seen(0, now) for rank in requests}
        for rank, seen in self._seen.items():
            seen.since = min(now, seen.since + unseen)
            if requests[rank] < seen.requests or requests[rank] >= self._replicas[rank].handle.max_concurrency:
                seen.since = now
            seen.requests = requests[rank]
        self._collect(now)
        if now >= self._next:
            self._next = now + self._interval
            for rank in self._seen.keys() - self._asked.keys():
                self._asked[rank] = self._replicas[rank].server.__ray_call__.remote(generated)
        return sorted(rank for rank, seen in self._seen.items() if now - seen.since > self._timeout)

    def _collect(self, now: float) -> None:
        asked = {answer: rank for rank, answer in self._asked.items()}
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for rank in map(asked.__getitem__, answered):
            try:
                answer = ray.get(self._asked.pop(rank))
            except RayError:
                continue  # dead: its clients find out, and say so
            seen = self._seen.get(rank)
            if seen is not None and (answer is None or answer != seen.answer):
                seen.answer, seen.since = answer, now
