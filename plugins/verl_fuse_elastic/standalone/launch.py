"""Creates one standalone replica in a thread, and destroys one: verl's `RolloutReplica.init_standalone` in a form that
can wait, be given up and be undone.

verl's own method refuses before it asks Ray for devices that Ray does not have yet; here the placement groups stay
pending, and pending groups make Ray's autoscaler start nodes.

Invariants (tests/integration/test_standalone.py):
- a start returns at once; the deadline counts from the start, waiting for devices included;
- a launch that fails, is given up or misses its deadline leaves no actor and no placement group;
- a destroyed replica's devices are free once its engine is dead, not before.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup, sort_placement_group_by_node_ip
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.vllm import end
from verl_fuse.host.upstream.watchdog import with_deadline

# As many processes share a device as in verl's own standalone replicas: the worker, and room for another process.
COLOCATED = 2
# Seconds between two looks at whether the launch was given up.
GIVEN_UP_LOOK = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """A replica that is up: the seconds until its devices came, and the seconds of its start after that; `placed` is
    the wall-clock time between."""

    replica: Any
    groups: tuple[PlacementGroup, ...]
    placed: float
    placement_seconds: float
    start_seconds: float


class Launch:
    """The creation of replica `rank`, under way: `build` makes a verl RolloutReplica that has not been
    started; `timeout` in seconds."""

    def __init__(self, build: Callable[[int], Any], rank: int, timeout: float):
        self.rank = rank
        self._build, self._timeout = build, timeout
        self._deadline = time.monotonic() + timeout
        self._replica: Any = None
        self._groups: tuple[PlacementGroup, ...] = ()
        self._given_up, self._done = threading.Event(), threading.Event()
        self._started: Started | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=f"verl-fuse replica {rank}", daemon=True).start()

    @property
    def done(self) -> bool:
        """Tell whether the replica is up, or never will be."""
        return self._done.is_set()

    def result(self) -> Started:
        """Return the replica, which belongs to the caller from now on; raise the error that kept it from starting. Only
        once `done`."""
        if self._started is None:
            raise FuseError(f"replica {self.rank} could not be created: {self._error}") from self._error
        return self._started

    def give_up(self) -> threading.Thread:
        """Undo the launch so far in the background, in the thread returned."""
        return in_background(f"giving up replica {self.rank}", self._undo)

    def _undo(self) -> None:
        self._given_up.set()
        self._done.wait()
        if self._started is not None:
            destroy(self._replica, self._groups)

    def _run(self) -> None:
        try:
            self._started = self._create()
        except Exception as error:  # noqa: BLE001  The error is handed to the caller.
            self._error = error
            destroy(self._replica, self._groups)
        finally:
            self._done.set()

    def _create(self) -> Started:
        begun = time.monotonic()
        self._replica = self._build(self.rank)
        pool = self._placed()
        placed, seconds = time.time(), time.monotonic() - begun
        self._replica.rollout_mode = RolloutMode.STANDALONE
        self._replica.resource_pool = pool
        # verl waits without a limit for a node that has gone since; once its placement group is
        # removed, that wait fails.
        left = max(0.0, self._deadline - time.monotonic())
        workers = with_deadline(
            f"the worker group of replica {self.rank}", left, self._worker_group, lambda: ["its node"]
        )
        self._replica.workers = workers.workers
        asyncio.run(self._launched())
        return Started(self._replica, self._groups, placed, seconds, time.monotonic() - begun - seconds)

    def _worker_group(self) -> RayWorkerGroup:
        return RayWorkerGroup(
            resource_pool=self._replica.resource_pool,
            ray_cls_with_init=self._replica.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"rollout_standalone_{self.rank}",
            use_gpu=True,
            device_name=get_device_name(),
        )

    def _placed(self) -> RayResourcePool:
        """Return a pool on placement groups of its own, one per node, once Ray has found room for them."""
        devices, nodes = self._replica.gpus_per_replica_node, self._replica.nnodes
        name = f"rollout_pool_{self.rank}"
        pool = RayResourcePool([devices] * nodes, use_gpu=True, max_colocate_count=COLOCATED, name_prefix=name)
        bundle = {"CPU": COLOCATED, get_platform().ray_resource_name(): 1}
        self._groups = tuple(
            placement_group([dict(bundle)] * devices, strategy="STRICT_PACK", name=f"{name}:{node}")
            for node in range(nodes)
        )
        for group in self._groups:
            while not group.wait(1):
                self._require_time(f"Ray found no room for {devices} x {bundle}")
        pool.pgs = sort_placement_group_by_node_ip(list(self._groups))
        return pool

    async def _launched(self) -> None:
        launching = asyncio.create_task(self._replica.launch_servers())
        try:
            while not (await asyncio.wait([launching], timeout=GIVEN_UP_LOOK))[0]:
                self._require_time("its engine did not start")
            launching.result()
        finally:
            launching.cancel()

    def _require_time(self, missing: str) -> None:
        if self._given_up.is_set():
            raise FuseError("it is not wanted any more")
        if time.monotonic() > self._deadline:
            raise FuseError(f"{missing} within {self._timeout:g} s (fuse.elastic.standalone_timeout)")


def destroy(replica: Any | None, groups: tuple[PlacementGroup, ...]) -> None:
    """End the processes of a replica, if the replica exists yet, then give its devices back to Ray."""
    try:
        if replica is not None:
            for server in replica.servers:
                end(server)
                _kill(server)
            for worker in replica.workers:
                _kill(worker)
    finally:
        for group in groups:
            remove_placement_group(group)


def _kill(actor: Any) -> None:
    # A process that is gone with its node needs no end.
    with suppress(RayError):
        ray.kill(actor)


def in_background(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a thread that keeps no process from exiting; an exception of `work` is logged."""

    def run() -> None:
        try:
            work()
        except Exception:
            logger.exception("%s failed", name)

    thread = threading.Thread(target=run, name=f"verl-fuse {name}", daemon=True)
    thread.start()
    return thread
