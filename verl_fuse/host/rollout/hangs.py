"""Finds replicas that have requests but stand still, and ends them, so that their requests fail
and start again elsewhere.

A client cannot tell a hung replica from a slow one: an answer comes at the end. The server can: it knows how many
tokens each of its requests has. The server is asked at intervals, and no caller waits for its answer.

Invariants (tests/integration/test_replicas.py):
- a replica is hung once its requests have not changed, or the replica has not answered, for `timeout` seconds in which
it always had requests;
- a replica that generates, however slowly, or whose engine does not report tokens, is never called hung, nor a replica
with so many requests that a question waits behind them;
- time without a look, such as the time between two steps, does not count;
- a look takes no longer when a replica hangs.
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
    """A replica's requests in flight and last answer, and the time since neither has changed."""

    requests: int
    since: float
    answer: Any = None


class HangWatch:
    """A watch over the servers of `replicas`, by rank; the set of replicas may change."""

    def __init__(self, replicas: Mapping[int, Replica], timeout: float):
        self._replicas, self._timeout = replicas, timeout
        self._interval = min(INTERVAL, timeout / 5)
        self._next, self._looked = 0.0, time.monotonic()
        self._asked: dict[int, ray.ObjectRef] = {}
        self._seen: dict[int, _Seen] = {}

    def hung(self, requests: Mapping[int, int]) -> list[int]:
        """Return the ranks of hung replicas among those that have requests in flight; `requests` maps a rank to their
        number."""
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
                continue  # A dead replica is found and reported by its clients.
            seen = self._seen.get(rank)
            if seen is not None and (answer is None or answer != seen.answer):
                seen.answer, seen.since = answer, now
