"""Finds replicas that have requests but stand still, and ends them, so that their requests fail and start again elsewhere.

A client cannot tell a hung replica from a slow one: an answer comes at the end. The server can: it knows how many tokens each of its requests
has. It is asked now and then, and nobody waits for its answer.

Invariants (tests/integration/test_replicas.py):
- a replica is hung once nothing about its requests has changed, or it has not answered, for `timeout` seconds in which it always had some;
- one that generates, however slowly, or whose engine does not say, is never called hung, nor one with so many requests that a question waits behind them;
- time in which nobody looked, as between two steps, does not count;
- looking takes no longer when a replica hangs.
"""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl_fuse.host.upstream.death import engine_processes

# Seconds between two questions, at most; and until a server has ended its engine.
INTERVAL = 10.0
ENDING = 10.0


@dataclass(slots=True)
class _Seen:
    """A replica's requests in flight and last answer, and since when nothing of that has changed."""

    requests: int
    since: float
    answer: Any = None


class HangWatch:
    """Watches the servers of `replicas` (verl's RolloutReplica, by rank); which there are may change."""

    def __init__(self, replicas: Mapping[int, Any], timeout: float):
        self._replicas, self._timeout = replicas, timeout
        self._interval = min(INTERVAL, timeout / 5)
        self._next, self._looked = 0.0, time.monotonic()
        self._asked: dict[int, ray.ObjectRef] = {}
        self._seen: dict[int, _Seen] = {}

    def hung(self, requests: Mapping[int, int]) -> list[int]:
        """Which replicas are hung, of those that have requests in flight: how many."""
        now = time.monotonic()
        unseen, self._looked = max(0.0, now - self._looked - self._interval), now
        self._seen = {rank: self._seen.get(rank) or _Seen(0, now) for rank in requests}
        for rank, seen in self._seen.items():
            seen.since = min(now, seen.since + unseen)
            if requests[rank] < seen.requests or requests[rank] >= self._replicas[rank].max_concurrency:
                seen.since = now
            seen.requests = requests[rank]
        self._collect(now)
        if now >= self._next:
            self._next = now + self._interval
            for rank in self._seen.keys() - self._asked.keys():
                self._asked[rank] = self._replicas[rank].servers[0].__ray_call__.remote(_requests)
        return sorted(rank for rank, seen in self._seen.items() if now - seen.since > self._timeout)

    def _collect(self, now: float) -> None:
        if not self._asked:
            return
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for rank in [rank for rank, reference in self._asked.items() if reference in answered]:
            try:
                answer = ray.get(self._asked.pop(rank))
            except RayError:
                continue  # dead: its clients find out, and say so
            seen = self._seen.get(rank)
            if seen is not None and (answer is None or answer != seen.answer):
                seen.answer, seen.since = answer, now


def end(server: Any) -> None:
    """End the engine behind a server, or, if it does not do so itself, the server."""
    ended = server.__ray_call__.remote(_kill_engine)
    done, _ = ray.wait([ended], timeout=ENDING)
    try:
        if done and ray.get(ended):
            return
    except RayError:
        return  # dead already
    ray.kill(server)


def _requests(server: Any) -> tuple[int, int] | None:
    """Runs inside a server: a fingerprint of its requests and of the tokens they have; None if the engine does not say (vLLM's AsyncLLM does)."""
    states = getattr(getattr(getattr(server, "engine", None), "output_processor", None), "request_states", None)
    if states is None:
        return None
    tokens = {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state.detokenizer}
    return len(states), hash(frozenset(tokens.items()))


def _kill_engine(server: Any) -> int:
    """Runs inside a server: end its engine processes; how many it knows of."""
    processes = engine_processes(server)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return len(processes)
