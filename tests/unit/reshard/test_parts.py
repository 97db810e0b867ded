"""The invariants in the docstrings of verl_fuse/reshard: streams, balance, rounds, rectangles, seconds."""

import random

import numpy as np
import pytest
from layouts import QWEN2, random_pair
from ortools.linear_solver import pywraplp
from transfer_seconds import predicted_seconds

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.reshard import fsdp
from verl_fuse.reshard.balance import balanced_cuts
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.order import order_of
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.program import StreamRange, plan_transfer
from verl_fuse.reshard.rectangles import rectangles
from verl_fuse.reshard.rounds import hops_of
from verl_fuse.reshard.routes import flows_of
from verl_fuse.reshard.sharding import Cells, PlacedSharding
from verl_fuse.reshard.streams import NOBODY, Streams, streams_of
from verl_fuse.reshard.text import sharding_from
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model_names import model_named


def random_streams(seed: int) -> tuple:
    draw = random.Random(seed)
    weights, source, target, nodes = random_pair(draw, 32)
    return weights, target, np.array(nodes), streams_of(weights, source, target, nodes)


@pytest.mark.parametrize("seed", range(20))
def test_atoms_tile_what_the_target_holds_and_no_two_streams_have_the_same_groups(seed: int):
    weights, _, _, streams = random_streams(seed)
    covered = {p.name: np.zeros((4 * p.rows + 4096, p.columns), np.int8) for p in weights.parameters}
    for atom in range(len(streams.row)):
        row, column = streams.row[atom], streams.column[atom]
        name = weights.parameters[streams.parameter[atom]].name
        covered[name][row : row + streams.rows[atom], column : column + streams.columns[atom]] += 1
    for parameter in weights.parameters:
        assert (covered[parameter.name][: parameter.rows] == 1).all()
        assert covered[parameter.name].max() == 1
    groups = list(zip(streams.source.tolist(), streams.target.tolist(), strict=True))
    assert len(set(groups)) == len(groups)
    assert all(NOBODY not in pair for pair in groups)
    areas = streams.rows.astype(np.int64) * streams.columns
    assert [
        int(areas[a:b].sum()) for a, b in zip(streams.first, streams.first[1:], strict=False)
    ] == streams.size.tolist()


def test_a_parameter_nobody_holds_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fsdp, "_cells", lambda rows, columns, *_: Cells((0, rows), (0, columns), (((),),)))
    with pytest.raises(FuseError, match=r"parameter 'model.embed_tokens.weight': row 0 is wanted by vllm tp2 on 0,1"):
        streams_of(
            QWEN2, PlacedSharding.at(sharding_from("fsdp 4")), PlacedSharding.at(sharding_from("vllm tp2")), [0] * 4
        )


@pytest.mark.parametrize(("keys", "bins"), [(0, 5), (1000, 7), (1000, 900), (10, 100_000)])
def test_small_numbers_are_sorted_as_numpy_does(keys: int, bins: int):
    numbers = np.random.default_rng(keys + bins).integers(0, bins, keys)
    assert order_of(numbers, bins).tolist() == np.argsort(numbers, kind="stable").tolist()


@pytest.mark.parametrize("seed", range(20))
def test_tasks_are_shared_out_as_evenly_as_a_linear_program_does(seed: int):
    draw = np.random.default_rng(seed)
    ranks, tasks = 12, 15
    sets = [draw.choice(ranks, draw.integers(1, 6), replace=False) for _ in range(tasks)]
    amounts = draw.integers(0, 100_000, tasks)
    first = np.append(0, np.cumsum([len(s) for s in sets]))
    candidates = np.concatenate(sets)
    cuts = balanced_cuts(amounts, first, candidates, ranks)
    load = np.zeros(ranks)
    for task in range(tasks):
        part = np.diff(np.append(cuts[first[task] : first[task + 1]], amounts[task]))
        assert part.min() >= 0
        assert part.sum() == amounts[task]
        load[sets[task]] += part
    solver = pywraplp.Solver.CreateSolver("GLOP")
    most, sums = solver.NumVar(0, solver.infinity(), ""), {rank: [] for rank in range(ranks)}
    for task in range(tasks):
        parts = [solver.NumVar(0, solver.infinity(), "") for _ in sets[task]]
        solver.Add(sum(parts) == float(amounts[task]))
        for rank, part in zip(sets[task], parts, strict=True):
            sums[int(rank)].append(part)
    for parts in sums.values():
        solver.Add(sum(parts) <= most)
    solver.Minimize(most)
    solver.Solve()
    assert load.max() <= 1.01 * most.solution_value() + tasks


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_bounded_and_rounds_cannot_deadlock(seed: int):
    _, _, nodes, streams = random_streams(seed)
    flows = flows_of(streams, nodes)
    limit = 300
    hops = hops_of(flows, limit, len(nodes))
    sizes = hops.high - hops.low
    assert sizes.max(initial=0) <= limit
    for flow in range(len(flows)):
        assert np.ptp(sizes[hops.flow == flow]) <= 1
    for ranks in (hops.sender, hops.receiver):
        assert len(set(zip(ranks.tolist(), hops.round.tolist(), strict=True))) == len(hops)
    arrived = {(f, low, r): at for f, low, r, at in zip(hops.flow, hops.low, hops.receiver, hops.round, strict=True)}
    for flow, low, sender, place, at in zip(hops.flow, hops.low, hops.sender, hops.place, hops.round, strict=True):
        assert place == 0 or arrived[flow, low, sender] < at
    assert (np.diff(hops.round) >= 0).all()


def test_a_span_is_read_row_by_row():
    """One atom of 3 rows of 4, at row 10 and column 20 of parameter 5."""
    one = np.array([3], np.int32)
    streams = Streams(
        groups=((), (0,), (1,)),
        source=np.array([1]),
        target=np.array([2]),
        size=np.array([12]),
        first=np.array([0, 1]),
        parameter=one + 2,
        row=one + 7,
        rows=one,
        column=one + 17,
        columns=one + 1,
        offset=np.array([0]),
    )
    found = [(r.row, r.rows, r.column, r.columns, r.at) for r in rectangles(streams, StreamRange(0, 2, 11))]
    assert found == [(10, 1, 22, 2, 0), (11, 1, 20, 4, 2), (12, 1, 20, 3, 6)]
    whole = [(r.row, r.rows, r.column, r.columns, r.at) for r in rectangles(streams, StreamRange(0, 0, 12))]
    assert whole == [(10, 3, 20, 4, 0)]


LLAMA_7B = parameters_of(model_named("llama-7b"), "llama")


def program_and_estimate(source: tuple[int, str], target: tuple[int, str]) -> tuple[float, float]:
    """Seconds of the program and of the planner's estimate, on four H100 nodes, for layouts that
    begin at the given devices."""
    cost = AnalyticCost(cluster_named("h100", nodes=4))
    layouts = [(first, Layout.parse(text)) for first, text in (source, target)]
    have, want = (PlacedSharding.at(MegatronSharding(layout), first) for first, layout in layouts)
    program = plan_transfer(LLAMA_7B, have, want, nodes=[rank // 8 for rank in range(32)])
    placements = [(Mesh(first, layout.devices), layout) for first, layout in layouts]
    return predicted_seconds(program, cost.network), cost.transfer(LLAMA_7B.model, *placements)


def test_nothing_takes_no_time():
    assert program_and_estimate((0, "tp2 pp2"), (0, "tp2 pp2")) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((0, "tp8"), (8, "tp8")),
        ((0, "tp8"), (8, "tp8 dp2")),
        ((0, "tp8"), (0, "tp2 dp4")),
        ((0, "tp8 dp2"), (16, "tp8 dp2")),
        ((0, "tp2 pp4"), (8, "tp4 pp2")),
    ],
)
def test_a_program_takes_what_the_planner_expects(source: tuple[int, str], target: tuple[int, str]):
    program, estimate = program_and_estimate(source, target)
    assert program == pytest.approx(estimate, rel=0.15)
