import numpy as np
import pytest
from spaces import CLUSTER, GRPO, filled, random_choice, random_space

from verl_fuse.plan.evaluate import EVALUATED_STEPS, fits, peak_bytes, schedule
from verl_fuse.plan.space import CallConfig, PlanSpace
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout


def run(space: PlanSpace, choice, steps: int = EVALUATED_STEPS) -> tuple[float, np.ndarray, np.ndarray]:
    starts, ends = np.empty(2 * len(choice)), np.empty(2 * len(choice))
    return schedule(space.tables, np.array(choice, np.int64), steps, starts, ends), starts, ends


def grpo(*placed: tuple[Mesh, Layout, float]) -> PlanSpace:
    """One option per call of GRPO, weights one byte each; a move takes 0.5 s."""
    configs = [
        [CallConfig(layout, 1, False, seconds, *bytes_of)]
        for (_, layout, seconds), bytes_of in zip(placed, BYTES, strict=True)
    ]
    space = PlanSpace.build(GRPO, CLUSTER, configs, [mesh for mesh, _, _ in placed], 6.0)
    begin = space.tables.begin
    mine = [
        next(o for o in range(begin[c], begin[c + 1]) if space.meshes[space.mesh[o]] == placed[c][0]) for c in range(4)
    ]
    space = space.keep(np.isin(np.arange(space.config.size), mine)).with_room_for_moves()
    space.fill(lambda role, train, user: 0.5, np.arange(4))
    return space


# resident, active, copy of generate, reference_infer, actor_infer, actor_train
BYTES = ((0, 2, 1), (1, 1, 0), (0, 1, 1), (3, 1, 0))
ALL, LEFT, RIGHT = Mesh(0, 8), Mesh(0, 4), Mesh(4, 4)


def test_calls_on_the_same_devices_run_one_after_the_other():
    dp = Layout(dp=8)
    seconds, starts, _ = run(grpo((ALL, dp, 4), (ALL, dp, 1), (ALL, dp, 1), (ALL, dp, 3)), range(4))
    assert seconds == 9
    assert (starts[:4] - starts[0]).tolist() == [0, 4, 5, 6]
    assert np.isnan(starts[4:]).all()


def test_disjoint_calls_overlap_and_a_move_precedes_generation():
    half = Layout(dp=4)
    space = grpo((ALL, Layout(tp=8), 4), (LEFT, half, 2), (RIGHT, half, 1), (RIGHT, half, 3))
    seconds, starts, ends = run(space, range(4))
    # 0.5 for the weights, 4 generation, 2 for the slower inference, 3 training.
    assert seconds == 9.5
    assert ends[4] - starts[4] == 0.5
    assert starts[1] == starts[2]


def test_shared_weights_are_counted_once():
    dp = Layout(dp=8)
    same = grpo((ALL, dp, 4), (ALL, dp, 1), (ALL, dp, 1), (ALL, dp, 3))
    other = grpo((ALL, Layout(tp=8), 4), (ALL, dp, 1), (ALL, dp, 1), (ALL, dp, 3))
    # Resident: the reference (1) and what trains (3); active: generation (2), with a copy (1) if
    # its layout is another one.
    assert peak_bytes(same.tables, np.arange(4), 0) == 1 + 3 + 2
    assert peak_bytes(other.tables, np.arange(4), 0) == 1 + 3 + 2 + 1
    assert (fits(same.tables, np.arange(4)), fits(other.tables, np.arange(4))) == (True, False)


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_keep_the_invariants(seed: int):
    space = filled(random_space(seed, options=3))
    t, rng = space.tables, np.random.default_rng(seed)
    for _ in range(20):
        choice = random_choice(space, rng)
        n = len(choice)
        seconds, starts, ends = run(space, choice)
        assert seconds == pytest.approx(run(space, choice, 12)[0])
        for b in range(n):
            for a in np.flatnonzero(t.before[:, b]):
                assert ends[a] <= starts[b] + 1e-9
            if not np.isnan(ends[n + b]):
                assert ends[n + b] <= starts[b] + 1e-9
        nodes = [(starts[c], ends[c], {c}) for c in range(n)]
        nodes += [(starts[n + c], ends[n + c], {c, int(t.source[c])}) for c in range(n) if not np.isnan(starts[n + c])]
        for i, (start, end, where) in enumerate(nodes):
            for other_start, other_end, other_where in nodes[:i]:
                meshes = (
                    (space.meshes[space.mesh[choice[x]]], space.meshes[space.mesh[choice[y]]])
                    for x in where
                    for y in other_where
                )
                if any(x.overlaps(y) for x, y in meshes):
                    assert end <= other_start + 1e-9 or other_end <= start + 1e-9
