"""Random small search spaces with the graphs of PPO and GRPO, for tests of evaluation, bound and search."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from verl_fuse.plan.descent import cost
from verl_fuse.plan.meshes import legal_meshes
from verl_fuse.plan.space import CallConfig, PlanSpace
from verl_fuse.spec.cluster import Cluster, Device, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.workload import Call

CLUSTER = Cluster(2, 4, Device("toy", 6.0, 1.0, 1.0), 1.0, 1.0, 1.0)
_SCORES = ("reward", "reference", "critic")
PPO = (
    Call("generate", "actor", "generate"),
    *(Call(f"{role}_infer", role, "infer", ("generate",)) for role in _SCORES),
    *(Call(f"{role}_train", role, "train", tuple(f"{r}_infer" for r in _SCORES)) for role in ("critic", "actor")),
)
GRPO = (
    Call("generate", "actor", "generate"),
    Call("reference_infer", "reference", "infer", ("generate",)),
    Call("actor_infer", "actor", "infer", ("generate",)),
    Call("actor_train", "actor", "train", ("reference_infer", "actor_infer")),
)


def random_space(seed: int, options: int = 5, calls=None, tight: float = 1.0) -> PlanSpace:
    """`options` options per call on 2 nodes of 4 devices; the larger `tight`, the more fits."""
    rng = np.random.default_rng(seed)
    calls = calls or (PPO if seed % 3 else GRPO)
    meshes = legal_meshes(CLUSTER)
    configs = []
    for call in calls:
        work, of_call = rng.choice([1.0, 4.0, 16.0]), []
        uses = call.kind != "train" and any(c.role == call.role and c.kind == "train" for c in calls)
        for size in (1, 2, 4, 8):
            for layout in (Layout(dp=size), Layout(tp=size), Layout(pp=size)):
                seconds = work / size ** rng.uniform(0.3, 1.0)
                resident, active, copy = rng.uniform(0, 1, 3) * (0 if uses else 1, 2, 1 if uses else 0)
                of_call.append(CallConfig(layout, 1, False, seconds, resident, active, copy))
        configs.append(of_call)
    space = PlanSpace.build(calls, CLUSTER, configs, meshes, 6.0 * tight)
    begin = space.tables.begin
    kept = [rng.choice(np.arange(begin[c], begin[c + 1]), options, replace=False) for c in range(len(calls))]
    return space.keep(np.isin(np.arange(space.config.size), np.concatenate(kept)))


def random_move(role: str, train: tuple[Mesh, CallConfig], user: tuple[Mesh, CallConfig]) -> float:
    """Anything between 0.1 and 2 seconds, but always the same for the same layouts that lie the same."""
    (mesh, config), (other, other_config) = train, user
    apart = not mesh.overlaps(other) and "apart"
    text = f"{role} {config.layout} {other_config.layout} {apart or other.first - mesh.first}"
    if apart and len({*mesh.nodes(4), *other.nodes(4)}) == 1:
        text += " beside"
    return 0.1 + int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) / 0xFFFF * 1.9


def filled(space: PlanSpace) -> PlanSpace:
    """With every move filled in."""
    space = space.with_room_for_moves()
    for choice in choices(space):
        space.fill(random_move, choice)
    return space


def choices(space: PlanSpace, plan: Sequence[int] = (), fixed: Sequence[int] = ()) -> Iterator[np.ndarray]:
    """Yield every plan of the space, or every plan that shares the options of some calls with `plan`."""
    begin = space.tables.begin
    spans = [[plan[c]] if c in fixed else range(begin[c], begin[c + 1]) for c in range(begin.size - 1)]
    return (np.array(choice, np.int64) for choice in itertools.product(*spans))


def random_choice(space: PlanSpace, rng: np.random.Generator) -> np.ndarray:
    begin = space.tables.begin
    return np.array([rng.integers(begin[c], begin[c + 1]) for c in range(begin.size - 1)], np.int64)


def best_by_brute_force(space: PlanSpace) -> float:
    """The least cost over all plans of a space whose moves are filled in."""
    return min(cost(space.tables, choice) for choice in choices(space))
