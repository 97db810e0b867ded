"""Manages the standalone replicas of a run: they are created ahead of need, are in the rollout from the next weight
sync on, and are destroyed when they are not wanted.

Invariants (tests/integration/test_standalone.py, test_standalone_run.py):
- neither the pool nor a step waits for a replica to start;
- a replica is routed only after it has loaded the weights of the step, and its server confirms them;
- a replica that dies, hangs or fails to load is destroyed, and the run goes on without it;
- a rank is given once: names and sockets of a replica that is gone are never met again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Recorder, Stopwatch
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.spec.timeline import Span
from verl_fuse_elastic.standalone.launch import Launch, Started, destroy, in_background
from verl_fuse_elastic.standalone.weights import load

# The end of a run waits this many seconds for replicas to be destroyed.
CLOSING = 60.0

logger = logging.getLogger(__name__)


class StandalonePool:
    """A pool of at most `most` standalone replicas beside the others of `replicas`; `build(rank)` is a verl
    RolloutReplica that has not been started.

    `launch_timeout`: seconds in which a replica must be up, waiting for devices included; `load_timeout`: seconds in
    which it must load new weights.
    """

    def __init__(
        self,
        build: Callable[[int], Any],
        most: int,
        replicas: Replicas,
        recorder: Recorder,
        launch_timeout: float,
        load_timeout: float,
    ):
        self._build, self.most, self._replicas, self._recorder = build, most, replicas, recorder
        self._launch_timeout, self._load_timeout = launch_timeout, load_timeout
        self._next = max(replicas.addresses) + 1
        self._launches: list[Launch] = []
        self._members: dict[int, Started] = {}
        self._ending: list[threading.Thread] = []

    def want(self, count: int) -> None:
        """Ask for `count` replicas from now on: begin to create missing replicas, or destroy surplus replicas, the
        newest first."""
        self._bury_lost()
        for rank in list(self._members)[count:]:
            self._destroy(rank)
        under_way = count - len(self._members)
        for launch in self._launches[under_way:]:
            self._end(launch.give_up())
            logger.info("replica %d is not wanted any more before it was up", launch.rank)
        self._launches = self._launches[:under_way]
        while len(self._launches) < under_way:
            self._launches.append(Launch(self._build, self._next, self._launch_timeout))
            logger.info("replica %d is being created", self._next)
            self._next += 1

    def take_in(self) -> bool:
        """Take in replicas that are up, between two steps; return whether the pool has a replica, so that weights are
        needed."""
        self._bury_lost()
        for launch in [launch for launch in self._launches if launch.done]:
            self._launches.remove(launch)
            try:
                started = launch.result()
            except FuseError as error:
                logger.error("%s; the run goes on without it", error)
                continue
            self._members[launch.rank] = started
            self._replicas.join(started.replica)
            seconds = {"placement_seconds": started.placement_seconds, "start_seconds": started.start_seconds}
            logger.info("replica %d is up: devices after %.1f s, engine after %.1f s", launch.rank, *seconds.values())
            # The wall clock may have been set back since.
            end = max(started.placed, Stopwatch().now)
            self._recorder.add(Span("start", f"replica {launch.rank}", "other", started.placed, end, seconds))
        return bool(self._members)

    def load(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Let all replicas load the weights of step `version` (weights.py); `Replicas.readmit` then routes them."""
        routed = [view.rank for view in self._replicas.views() if view.routed and view.rank in self._members]
        if routed:
            self._replicas.free(routed, "the weight sync", "pause")
        watch = Stopwatch()
        members = {rank: self._members[rank].replica for rank in self._members if rank not in self._replicas.lost}
        failed = load(members, buckets, version, self._load_timeout)
        for rank in members:
            self._recorder.add(Span("load_weights", f"replica {rank}", "sync", watch.start, watch.now))
        for rank, why in failed.items():
            self._replicas.lose(rank, why)
        self._bury_lost()

    def close(self) -> None:
        """Destroy all replicas. Asks no actor: a run that ends because the load balancer is gone shows that error, not
        an error of this call."""
        for launch in self._launches:
            self._end(launch.give_up())
        for rank, started in self._members.items():
            self._end_replica(rank, started)
        self._launches, self._members = [], {}
        for thread in self._ending:
            thread.join(CLOSING)

    def _bury_lost(self) -> None:
        for rank in self._replicas.lost:
            self._destroy(rank)

    def _destroy(self, rank: int) -> None:
        started = self._members.pop(rank)
        self._replicas.leave(rank)
        logger.info("replica %d is destroyed", rank)
        self._end_replica(rank, started)

    def _end_replica(self, rank: int, started: Started) -> None:
        self._end(in_background(f"the end of replica {rank}", partial(destroy, started.replica, started.groups)))

    def _end(self, thread: threading.Thread) -> None:
        self._ending = [thread, *(ending for ending in self._ending if ending.is_alive())]
