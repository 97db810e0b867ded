"""Runs the event queue of a step: calls on meshes, several steps in a row.

Invariants (tests/unit/simulate/test_tasks.py):
- no two tasks overlap in time on a device;
- a task starts when the tasks that it waits for have ended and its devices are free, whichever task is ready first
  going first.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.timeline import Category


@dataclass(frozen=True)
class Task:
    """Work of `seconds` on all devices of `meshes`. `after` names tasks of the same step, `after_previous` of the step
    before.

    `stage` is verl's name of the step's stage.
    """

    name: str
    stage: str
    category: Category
    meshes: tuple[Mesh, ...]
    seconds: float
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()

    @property
    def device_seconds(self) -> float:
        """Return the seconds on each of its devices, summed."""
        return self.seconds * len({device for mesh in self.meshes for device in range(mesh.first, mesh.end)})


@dataclass(frozen=True)
class ScheduledTask:
    """A task of one step in time."""

    task: Task
    step: int
    start: float
    end: float


def run_tasks(steps: Sequence[Sequence[Task]], devices: int) -> list[ScheduledTask]:
    """Place all tasks of all steps; a FuseError names tasks that wait for each other or for a task that is not
    there."""
    tasks = {(number, task.name): task for number, step in enumerate(steps) for task in step}
    waits = {
        (number, task.name): [(number, name) for name in task.after]
        + [(number - 1, name) for name in task.after_previous if number]
        for number, step in enumerate(steps)
        for task in step
    }
    dependants: dict[tuple[int, str], list[tuple[int, str]]] = {key: [] for key in tasks}
    for key, sources in waits.items():
        for source in sources:
            if source not in tasks:
                raise FuseError(
                    f"task {key[1]!r} waits for {source[1]!r}, which is not in the step; there is "
                    f"{', '.join(name for _, name in tasks)}"
                )
            dependants[source].append(key)
    order = {key: index for index, key in enumerate(tasks)}
    missing = {key: len(sources) for key, sources in waits.items()}
    ready = dict.fromkeys(tasks, 0.0)
    queue = [(0.0, order[key], key) for key, count in missing.items() if count == 0]
    heapq.heapify(queue)
    free = np.zeros(devices)
    placed: list[ScheduledTask] = []
    while queue:
        moment, _, key = heapq.heappop(queue)
        task = tasks[key]
        start = max([moment, *(float(free[m.first : m.end].max()) for m in task.meshes)])
        for mesh in task.meshes:
            free[mesh.first : mesh.end] = start + task.seconds
        placed.append(ScheduledTask(task, key[0], start, start + task.seconds))
        for other in dependants[key]:
            ready[other] = max(ready[other], start + task.seconds)
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(queue, (ready[other], order[other], other))
    if len(placed) < len(tasks):
        stuck = sorted({name for (_, name), count in missing.items() if count})
        raise FuseError(f"tasks {', '.join(stuck)} wait for each other")
    return placed
