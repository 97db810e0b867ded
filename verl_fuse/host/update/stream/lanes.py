"""Calls the ranks that train on the devices of each replica, while others generate.

A shard group of the actor's workers is on the devices of one replica. Calls of one shard group run one after the other,
on a lane; where a slice computes inference on the same devices, on the lane of the slice.

Invariants (tests/integration/test_stream_driver.py):
- a call reaches the ranks of its shard group alone, each with rows of its own; a rank without any gets one that does
  not count;
- what a call raises is kept for whoever asks, and ends neither its lane nor the run.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.upstream.death import first_line

logger = logging.getLogger(__name__)


def dealt(work: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return the keys of each part, of about the same work; `work` in tokens by key. A part is empty where there are
    fewer keys than parts."""
    keys = list(work)
    if len(keys) < parts:
        return [[key] for key in keys] + [[] for _ in range(parts - len(keys))]
    amounts = calculate_workload(torch.tensor([work[key] for key in keys], dtype=torch.int64)).tolist()
    found: Any = get_seqlen_balanced_partitions(amounts, parts, equal_size=False)
    return [[keys[place] for place in part] for part in found]


class StreamLanes:
    """`count` shard groups, in order of the ranks of their replicas; `lane_of(number)` is the lane of the slice there,
    or a new one."""

    def __init__(self, count: int, lane_of: Callable[[int], Lane]) -> None:
        self._count, self._lane_of = count, lane_of
        self._lanes: dict[int, Lane] = {}
        self.failure = ""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def queued(self, number: int) -> int:
        """Return the number of calls of this shard group that have not ended."""
        lane = self._lanes.get(number)
        return 0 if lane is None else lane.queued

    def submit(self, number: int, work: Callable[[], None], what: str) -> None:
        """Let `work` call the ranks of this shard group; does not wait."""
        if number not in self._lanes:
            self._lanes[number] = self._lane_of(number)
        self._lanes[number].submit(lambda: self._run(work, what), what)

    def drain(self) -> None:
        """Wait for all calls."""
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in self._lanes.values():
            lane.close()

    def _run(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("%s failed", what)
            self.failure = self.failure or f"{what} failed: {first_line(error)}"


def on_ranks(group: Any, calls: Sequence[tuple[int, str, tuple]]) -> list[Any]:
    """Return references to the results of workers of verl's worker group `group`: calls are (rank, method,
    arguments)."""
    return [_remote(group.workers[rank], method).remote(*args) for rank, method, args in calls]


def _remote(worker: Any, method: str) -> Any:
    # Roles in one process have the role's name before that of the method.
    (name,) = [name for name in dir(worker) if name == method or name.endswith(f"_{method}")]
    return getattr(worker, name)
