"""Measures the offsets of other nodes' clocks, so that a timeline has one clock: that of the driver's node.

Spans come with the wall clock of the node they were recorded on. An actor on each node with spans is asked for its
time, once a step; of several answers the answer with the shortest round trip counts, and the offset may be wrong by
half of the round trip. On one node no actor is asked.

Invariants (tests/unit/host/test_clocks.py):
- an offset is wrong by half of the shortest round trip at most;
- a node that does not answer keeps its last offset, 0 at first, and is named once.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

ROUND_TRIPS = 5
# A node may take this many seconds to answer; the first answer starts a process there.
ANSWER_SECONDS = 30.0


class NodeClock:
    """Ray actor that tells the time on its node."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()


def clock_offset(ask: Callable[[], float], clock: Callable[[], float] = time.time) -> float:
    """Return the seconds by which the clock that `ask` reads is ahead of `clock`."""
    best, found = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        sent = clock()
        there = ask()
        back = clock()
        if back - sent < best:
            best, found = back - sent, there - (sent + back) / 2
    return found


class NodeClocks:
    """Offsets of the nodes whose spans a run has seen."""

    def __init__(self) -> None:
        self._own = ray.get_runtime_context().get_node_id()
        self._actors: dict[str, Any] = {}
        self._offsets: dict[str, float] = {}
        self._silent: set[str] = set()

    def offsets(self, nodes: Collection[str]) -> dict[str, float]:
        """Return the seconds by which the clock of each of `nodes` is ahead of this node's, measured now."""
        for node in nodes:
            if node != self._own:
                self._measure(node)
        return {node: self._offsets.get(node, 0.0) for node in nodes}

    def _measure(self, node: str) -> None:
        try:
            if node not in self._actors:
                self._actors[node] = started_clock(node)
                ray.get(self._actors[node].now.remote(), timeout=ANSWER_SECONDS)
            self._offsets[node] = clock_offset(lambda: ray.get(self._actors[node].now.remote(), timeout=ANSWER_SECONDS))
        except RayError as error:
            self._actors.pop(node, None)
            if node not in self._silent:
                self._silent.add(node)
                logger.warning(
                    "the clock of node %s cannot be asked (%s): its spans keep an offset of %g s",
                    node,
                    type(error).__name__,
                    self._offsets.get(node, 0.0),
                )


def started_clock(node: str) -> Any:
    """Return a NodeClock on the node of this name."""
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(NodeClock).options(scheduling_strategy=pinned).remote()
