"""Calls the ranks that train on the devices of each replica, while others generate.

A shard group of the actor's workers is on the devices of one replica. Calls of one shard group run one after the other,
on a lane; where a slice computes inference on the same devices, on the lane of the slice.

Invariants (tests/integration/test_stream_driver.py):
- a call reaches the ranks of its shard group alone, each with rows of its own; a rank without any gets one that does
  not count;
- what a call raises is kept for whoever asks, and ends neither its lane nor the run;
- but where a rank failed and its partners do not return, they wait for it in a collective: that ends the run.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_fuse.errors import FuseError
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.upstream.death import first_line

logger = logging.getLogger(__name__)

# Seconds that the partners of a rank that failed have to return.
PARTNERS_SECONDS = 60.0


class Stranded(FuseError):
    """Ranks wait in a collective for a partner that failed."""


def answers_together(calls: Sequence[ray.ObjectRef], ranks: Sequence[int], seconds: float = PARTNERS_SECONDS) -> None:
    """Wait for the calls of `ranks`, which compute together, and raise what one of them raised; a Stranded error where
    others have not returned `seconds` later."""
    try:
        ray.get(list(calls))
    except RayError as error:
        _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
        if not waiting:
            raise
        partners = ", ".join(str(rank) for rank, call in zip(ranks, calls, strict=True) if call in waiting)
        raise Stranded(
            f"fuse.update.stream=true: a training rank failed ({first_line(error)}), and its partners (rank "
            f"{partners}) wait for it in a collective: the run cannot go on. If memory was short: a smaller "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu), or "
            "fuse.update.stream=false"
        ) from error


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
        # Why ranks are lost to the run.
        self.stranded: Stranded | None = None

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
            if isinstance(error, Stranded):
                self.stranded = error
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
