"""The event queue."""

from itertools import pairwise

import numpy as np
import pytest

from verl_fuse.errors import FuseError
from verl_fuse.simulate.tasks import Task, run_tasks
from verl_fuse.spec.cluster import Mesh

ALL, LEFT, RIGHT = Mesh(0, 4), Mesh(0, 2), Mesh(2, 2)


def task(name: str, mesh: Mesh, seconds: float, *after: str, previous: tuple[str, ...] = ()) -> Task:
    return Task(name, name, "other", (mesh,), seconds, after, previous)


def times(placed):
    return {(p.step, p.task.name): (p.start, p.end) for p in placed}


def test_tasks_on_other_devices_run_side_by_side():
    step = [task("a", LEFT, 2), task("b", RIGHT, 3), task("c", ALL, 1, "a")]
    assert times(run_tasks([step], 4)) == {(0, "a"): (0, 2), (0, "b"): (0, 3), (0, "c"): (3, 4)}


def test_who_is_ready_first_goes_first():
    step = [task("a", LEFT, 2), task("b", RIGHT, 1), task("c", ALL, 5, "a"), task("d", RIGHT, 1, "b")]
    assert times(run_tasks([step], 4))[0, "d"] == (1, 2)


def test_a_step_waits_for_the_step_before():
    step = [task("gen", LEFT, 2, previous=("train",)), task("train", RIGHT, 3, "gen")]
    placed = times(run_tasks([step] * 3, 4))
    assert placed[2, "gen"] == (10, 12)
    free = [task("gen", LEFT, 2), task("train", RIGHT, 3, "gen")]
    assert times(run_tasks([free] * 3, 4))[2, "train"] == (8, 11)


def test_no_two_tasks_share_a_device():
    rng = np.random.default_rng(0)
    meshes = [Mesh(0, 4), Mesh(0, 1), Mesh(1, 1), Mesh(2, 2)]
    steps = []
    for _ in range(4):
        names = [f"t{i}" for i in range(8)]
        steps.append(
            [
                task(n, meshes[rng.integers(4)], rng.random(), *rng.choice(names[:i], min(i, 2)))
                for i, n in enumerate(names)
            ]
        )
    placed = run_tasks(steps, 4)
    assert len(placed) == 32
    for device in range(4):
        here = sorted((p.start, p.end) for p in placed if any(m.first <= device < m.end for m in p.task.meshes))
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(here))


def test_impossible_waits_are_refused():
    with pytest.raises(FuseError, match="'a' waits for 'x', which is not in the step"):
        run_tasks([[task("a", ALL, 1, "x")]], 4)
    with pytest.raises(FuseError, match="tasks a, b wait for each other"):
        run_tasks([[task("a", ALL, 1, "b"), task("b", ALL, 1, "a")]], 4)
