"""A rollout in which a policy decides."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo
from timings import roofline_timing

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import hookimpl
from verl_fuse.plugins import hooks
from verl_fuse.policy import Policy
from verl_fuse.simulate.decided import Setting, SimulatedPolicy, decided, shared_out
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.spec.step import Migration
from verl_fuse.timeline.idle import idle_table

RNG = np.random.default_rng(3)
RESPONSES = np.concatenate([RNG.integers(20, 60, 56), RNG.integers(300, 900, 8)])
GROUP = np.repeat(np.arange(32), 2)


class Silent:
    HOOK_API = 2


class OneByOne:
    """Frees the idlest replica whenever eight more samples are finished, and infers two samples at a time."""

    HOOK_API = 2

    @hookimpl
    def fuse_migration(self, view):
        routed = sorted((one for one in view.replicas if one.routed), key=lambda one: one.running)
        if len(routed) == 1 or view.finished < 40 + 8 * (len(view.replicas) - len(routed)):
            return None
        return Migration(tuple(one.rank for one in routed[1:]))

    @hookimpl
    def fuse_infer_next(self, view, lane):
        return None if lane.queued > 1 else [sample.key for sample in view.ready[:2]] or None


def begun(replicas: int = 4) -> RolloutState:
    requests = Requests.of(np.full(64, 30), RESPONSES)
    return RolloutState.begin(requests, roofline_timing(max_batch=32, kv_capacity=100_000), round_robin(64, replicas))


def setting(**changes) -> Setting:
    return replace(Setting(InferenceWork(1e-4), MigrationCost(0.01), ("ref",), poll=0.05), **changes)


def play(policy, **changes):
    return decided(begun(), GROUP, Policy(hooks(policy)), setting(**changes))


def test_without_an_answer_nothing_changes():
    found, through = play(Silent), begun().advance()
    np.testing.assert_array_equal(found.fused.rollout.finish, through.finish)
    assert (found.moves, found.calls) == ((), ())
    assert found.seen >= through.seconds > found.seen - 0.05
    work = float(InferenceWork(1e-4).work(through.requests).sum())
    assert found.inferred == pytest.approx(found.seen + work / 4)


@pytest.mark.parametrize(
    ("work", "free", "end"),
    [
        (8.0, [1.0, 1.0, 1.0, 1.0], 3.0),
        # The last one is busy for longer than the others need.
        (6.0, [0.0, 2.0, 50.0], 4.0),
        (2.0, [0.0, 2.0, 50.0], 2.0),
        (6.0, [3.0, 0.0, 0.0], 3.0),
        (0.0, [5.0, 4.0], 4.0),
    ],
)
def test_what_is_left_is_done_by_replicas_from_when_they_are_free(work: float, free: list[float], end: float):
    assert shared_out(work, np.array(free)) == pytest.approx(end)


def test_every_request_finishes_once_and_is_inferred_once_after_that():
    found = play(OneByOne)
    assert [len(move.survivors) for move in found.moves] == [3, 2, 1]
    finish = found.fused.rollout.finish
    assert np.isfinite(finish).all()
    keys = [key for call in found.calls for key in call.keys]
    assert len(keys) == len(set(keys)) > 20
    row = {f"p{g}_{s}_0": 2 * g + s for g in range(32) for s in range(2)}
    for call in found.calls:
        assert call.start >= max(finish[row[key]] for key in call.keys)
        freed = next(move for move in found.moves if call.replica not in move.survivors)
        assert call.start >= max(freed.time, freed.paused.clocks[call.replica])
    for rank in range(4):
        mine = [call for call in found.calls if call.replica == rank]
        assert all(after.start >= call.end for call, after in pairwise(mine))


def test_views_tell_what_has_happened_by_then():
    found = play(OneByOne)
    times = np.array([view.elapsed for view in found.views])
    assert (np.diff(times) > 0).all()
    assert np.diff(times).max() <= 0.5 + 0.05
    np.testing.assert_allclose(times / 0.05, np.round(times / 0.05), atol=1e-6)
    for view in found.views:
        assert sum(replica.running for replica in view.replicas) == view.unfinished
        assert len({sample.key for sample in view.ready}) == len(view.ready) <= view.finished
    last = found.views[-1]
    assert [replica.routed for replica in last.replicas].count(True) == 1
    assert [lane.name for lane in last.lanes] == [f"slice {one.rank}" for one in last.replicas if not one.routed]


def test_saturated_devices_have_no_lanes():
    found = play(OneByOne, inference=InferenceWork(1e-4, dedicated=False))
    assert len(found.moves) == 3
    assert found.calls == ()


def row(policy, workload, seeds: int = 1, cost=None):
    cost = cost or h100()
    plan, made = stock_plan(workload, cost, NO_POLL), SimulatedPolicy(lambda run: hooks(policy))
    steps = [
        simulate_step(workload, plan, cost, "observe", np.random.default_rng(seed), NO_POLL, made)
        for seed in range(seeds)
    ]
    return made, steps


def test_a_silent_policy_is_observe_mode():
    for workload in (ppo(), grpo()):
        _, (step,) = row(Silent, workload)
        plan = stock_plan(workload, h100(), NO_POLL)
        plain = simulate_step(workload, plan, h100(), "observe", np.random.default_rng(0), NO_POLL)
        assert step.seconds == pytest.approx(plain.seconds, rel=0.02), "but for prompts that are prefilled once"


class Halves(Silent):
    @hookimpl
    def fuse_migration(self, view):
        routed = [one.rank for one in view.replicas if one.routed]
        return Migration(tuple(routed[: len(routed) // 2])) if view.unfinished < 40 and len(routed) > 1 else None

    @hookimpl
    def fuse_infer_next(self, view, lane):
        return None if lane.queued else [sample.key for sample in view.ready[:32]] or None


def test_its_timeline_has_every_move_and_the_idle_share_of_the_step():
    made, (step,) = row(Halves, ppo(actor="qwen2.5-0.5b", critic="qwen2.5-0.5b", reference="qwen2.5-0.5b", reward=None))
    assert made.faults == []
    assert len(step.generation.moves) > 1
    assert step.idle == pytest.approx(idle_table(step.spans).overall)
    requests = [span for span in step.spans.spans if span.category == "generate"]
    parts = {name: [one for one in requests if one.name == name] for name in {span.name for span in requests}}
    assert max(map(len, parts.values())) > 2, "a request that moved twice"
    for name, spans in parts.items():
        spans.sort(key=lambda span: (span.start, span.end))
        assert all(after.start == pytest.approx(before.end) for before, after in pairwise(spans))
        number = int(name.split()[1])
        assert sum(int(span.args["response_tokens"]) for span in spans) == step.lengths.response[number]
        assert [span.args["stop_reason"] for span in spans] == ["aborted"] * (len(spans) - 1) + ["completed"]
    assert {track for track in step.spans.tracks if track.startswith("lane slice")}


def test_a_fault_costs_a_step_and_is_told():
    class Faulty(Silent):
        @hookimpl
        def fuse_migration(self, view):
            return Migration((99,)) if view.step == 1 else {}["key"]

    made, steps = row(Faulty, grpo(), seeds=2)
    assert made.faults == [
        "fuse_migration returned survivors [99]; allowed: some, but not all, of the replicas that take requests: "
        f"{list(range(steps[0].generation.replicas))}",
        "fuse_migration raised KeyError: 'key'",
    ]
    assert [step.generation.moves for step in steps] == [(), ()]


def test_an_observer_that_raises_is_named():
    class Observer(Silent):
        @hookimpl
        def fuse_event(self, event):
            raise ValueError("no")

    with pytest.raises(FuseError, match=r"fuse_event failed at StepBegun of step 1: ValueError: no; a run would end"):
        row(Observer, grpo())
