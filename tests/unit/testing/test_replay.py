"""A recorded step replayed through a policy."""

from itertools import pairwise
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.events import Generated, Migrated, Polled, StepBegun
from verl_fuse.spec.step import Migration
from verl_fuse.testing import recorded_step, replay
from verl_fuse.timeline.files import record_step

# Replica 0 has two long responses, replica 1 is done early.
STEP = recorded_step([[100, 20, 20, 90], [20, 20, 30, 20]], samples=2)


class Silent:
    HOOK_API = 2


class Policy:
    """Frees replica 1 once five samples are finished, and infers what is ready, one sample at a time."""

    HOOK_API = 2

    def __init__(self, keys=None):
        self.events, self.keys = [], keys

    @hookimpl
    def fuse_event(self, event):
        self.events.append(type(event))

    @hookimpl
    def fuse_setup(self, trainer):
        trainer.use_routing(None)

    @hookimpl
    def fuse_migration(self, view):
        routed = [replica.rank for replica in view.replicas if replica.routed]
        return Migration((0,)) if view.finished >= 5 and len(routed) == 2 else None

    @hookimpl
    def fuse_infer_next(self, view, lane):
        if lane.queued or not view.ready:
            return None
        return self.keys or [view.ready[0].key]


def test_without_an_answer_the_rollout_is_the_recorded_one():
    found = replay(Silent, STEP)
    assert found.generation == pytest.approx(2.0)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.seconds == pytest.approx(found.without)
    assert found.seconds == pytest.approx(3.0), "old log-probs and reference take a second"
    assert (found.moves, found.calls, found.used) == ((), (), ())


def test_the_policy_sees_what_has_happened_and_no_more():
    found = replay(Silent, STEP)
    assert [(round(view.elapsed, 2), view.finished) for view in found.views] == [
        (0.4, 5), (0.6, 6), (1.1, 6), (1.6, 6), (1.8, 7),
    ]  # fmt: skip
    first, last = found.views[0], found.views[-1]
    assert [sample.response_len for sample in first.ready] == [20] * 5
    assert [view.running for view in first.replicas] == [2, 1]
    assert (first.groups, first.groups_finished, last.groups_finished) == (4, 1, 3)
    assert sorted(sample.response_len for sample in last.ready) == [20] * 5 + [30, 90]


def test_what_it_decides_is_carried_out():
    policy = Policy()
    found = replay(policy, STEP)
    ((when, survivors),) = found.moves
    assert (round(when, 2), survivors) == (0.4, (0,))
    assert len(found.calls) > 1
    assert {call.replica for call in found.calls} == {1}
    for call, after in pairwise(found.calls):
        assert after.start >= call.end, "a lane runs one call at a time"
    keys = [key for call in found.calls for key in call.keys]
    assert len(keys) == len(set(keys))
    assert found.seconds < found.without
    assert found.used == (("use_routing", {"warm_prefix_tokens": None}),)
    assert policy.events[0] is StepBegun
    assert policy.events[-1] is Generated
    assert {Polled, Migrated} <= set(policy.events)
    # The moved request goes on after the time that a move takes.
    assert replay(Policy(), STEP, move_seconds=5.0).generation > found.generation


def test_assigned_prompts_are_generated_elsewhere():
    class Elsewhere(Silent):
        @hookimpl
        def fuse_assign(self, prompts, replicas, running):
            assert [(prompt.uid, prompt.samples) for prompt in prompts] == [(f"p{n}", 2) for n in range(4)]
            return {"p0": 1}

    first = replay(Elsewhere, STEP).views[0]
    assert [view.assigned for view in first.replicas] == [0, 2]
    assert sum(view.running for view in first.replicas) == 8 - first.finished


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["nosuch"], r"fuse_infer_next returned \['nosuch'\]; allowed: ready samples, each once"),
        (object(), r"fuse_infer_next returned <object object at .*>; allowed: Sequence, or None"),
    ],
)
def test_a_wrong_answer_is_raised(keys: object, message: str):
    with pytest.raises(FuseError, match=message):
        replay(Policy(keys), STEP)


def test_what_the_policy_raises_is_raised():
    class Raises(Silent):
        @hookimpl
        def fuse_migration(self, view):
            return {}[view.step]

    with pytest.raises(KeyError):
        replay(Raises, STEP)


def test_a_run_is_replayed_from_its_folder(tmp_path: Path):
    record_step(tmp_path / "run", STEP)
    assert replay(Silent, tmp_path / "run").views == replay(Silent, tmp_path / "run", step=1).views
    with pytest.raises(FuseError, match="step 2 is not recorded"):
        replay(Silent, tmp_path / "run", step=2)
    with pytest.raises(FuseError, match="needs at least one response"):
        recorded_step([])


def test_a_plugin_that_a_run_would_refuse_is_refused():
    class Old:
        @hookimpl
        def fuse_migration(self, view): ...

    with pytest.raises(FuseError, match=r"plugin Old declares HOOK_API=None; .* offers 2: set HOOK_API = 2 in it"):
        replay(Old, STEP)
