"""Finds replicas that hold requests but stand still, and tells how many requests a replica holds.

A client cannot tell a hung replica from a slow one: an answer comes at the end. The server can: it knows its requests,
and how many tokens each of them has. The server is asked at intervals, and no caller waits for its answer. The load
balancer's count of requests says whom to ask, and nothing more: a request that its agent gave up at the wrong moment,
or whose process died, may be counted for ever.

Invariants (tests/integration/test_replicas.py):
- a replica is hung once its requests have not changed, or the replica has not answered, for `timeout` seconds in which
it always had requests;
- a replica that generates, however slowly, that holds no request, or whose engine does not report its requests, is
never called hung, nor a replica with so many requests that a question waits behind them;
- a count that has not changed since well before the question gives way to the server's answer, if that is less;
- time without a look, such as the time between two steps, does not count;
- a look takes no longer when a replica hangs.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from verl_fuse.host.rollout.replica import Replica
from verl_fuse.host.upstream.vllm import held

# Seconds between two questions, at most.
INTERVAL = 10.0


@dataclass(slots=True)
class _Seen:
    """A replica's last count of requests, at this value since `counted`, and its last answer, to a question of the time
    `asked`; for so long `since` nothing has shown that it works."""

    since: float
    counted: float
    count: int = 0
    answer: Any = None
    asked: float = 0.0


class HangWatch:
    """A watch over the servers of `replicas`, by rank; the set of replicas may change."""

    def __init__(self, replicas: Mapping[int, Replica], timeout: float):
        self._replicas, self._timeout = replicas, timeout
        self._interval = min(INTERVAL, timeout / 5)
        self._next, self._looked = 0.0, time.monotonic()
        # By rank: the answer to come, and the time of the question.
        self._asked: dict[int, tuple[ray.ObjectRef, float]] = {}
        self._seen: dict[int, _Seen] = {}

    def hung(self, counts: Mapping[int, int], given_up: Mapping[int, int]) -> list[int]:
        """Return the ranks of hung replicas; `counts` maps the rank of each replica that may have requests to the load
        balancer's count of them. A question waits behind requests that were `given_up`, too: the server goes on with
        them."""
        now = time.monotonic()
        unseen, self._looked = max(0.0, now - self._looked - self._interval), now
        self._seen = {rank: self._seen.get(rank) or _Seen(now, now) for rank in counts}
        for rank, seen in self._seen.items():
            seen.since = min(now, seen.since + unseen)
            calls = counts[rank] + given_up.get(rank, 0)
            if counts[rank] < seen.count or calls >= self._replicas[rank].handle.max_concurrency:
                seen.since = now
            if counts[rank] != seen.count:
                seen.count, seen.counted = counts[rank], now
        self._collect(now)
        if now >= self._next:
            self._next = now + self._interval
            for rank in self._seen.keys() - self._asked.keys():
                self._asked[rank] = self._replicas[rank].server.__ray_call__.remote(held), now
        return sorted(rank for rank, seen in self._seen.items() if now - seen.since > self._timeout)

    def requests(self, rank: int, count: int) -> int:
        """Return the number of requests in flight at a replica of which the load balancer counts `count`. A request may
        be on its way to the server when that is asked, so the server's word counts after an interval without a
        change."""
        seen = self._seen.get(rank)
        if seen is None or seen.answer is None or count != seen.count or seen.asked < seen.counted + self._interval:
            return count
        return min(count, seen.answer[0])

    def _collect(self, now: float) -> None:
        asked = {answer: rank for rank, (answer, _) in self._asked.items()}
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for rank in map(asked.__getitem__, answered):
            reference, when = self._asked.pop(rank)
            try:
                answer = ray.get(reference)
            except RayTaskError:
                answer = None  # An engine that cannot say what it holds.
            except RayError:
                continue  # A dead replica is found and reported by its clients.
            if (seen := self._seen.get(rank)) is None:
                continue
            if answer is None or not answer[0] or answer != seen.answer:
                seen.since = now
            seen.answer, seen.asked = answer, when
