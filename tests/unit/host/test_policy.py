from dataclasses import replace

import pytest

from verl_fuse import hookspecs
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.spec.step import Migration, ReplicaView, Sample
from verl_fuse.testing import hooks, lane, view

LANE = lane(multiple=2)
READY = tuple(Sample(f"g_{i}_0", "g", 4, 8) for i in range(4))
VIEW = view(READY, step=3, expected=8, lanes=[LANE])


def guard(answer):
    class Plugin:
        HOOK_API = hookspecs.HOOK_API

        @hookspecs.hookimpl
        def fuse_infer_next(self, view, lane):
            if isinstance(answer, Exception):
                raise answer
            return answer

        @hookspecs.hookimpl
        def fuse_train_next(self, view, lane):
            return answer

    return PolicyGuard(hooks(Plugin))


MIGRATING = replace(VIEW, replicas=tuple(ReplicaView(rank, 2, 8, routed=rank < 3) for rank in range(4)))


def migration_guard(answer):
    class Plugin:
        HOOK_API = hookspecs.HOOK_API

        @hookspecs.hookimpl
        def fuse_migration(self, view):
            return answer

    return PolicyGuard(hooks(Plugin))


def test_a_good_migration_passes_through():
    assert migration_guard(Migration((0, 2))).migration(MIGRATING) == Migration((0, 2))
    assert migration_guard(None).migration(MIGRATING) is None


@pytest.mark.parametrize("survivors", [(), (0, 1, 2), (3,), (0, 7)])
def test_a_migration_that_leaves_nobody_or_everybody_or_a_stranger_costs_the_step_s_policies(survivors, caplog):
    policy = migration_guard(Migration(survivors))
    assert policy.migration(MIGRATING) is None
    assert policy.fallbacks == 1
    assert "allowed: some, but not all, of the replicas that take requests: [0, 1, 2]" in caplog.text


@pytest.mark.parametrize("answer", [[0], (0, 2), 1])
def test_an_answer_of_another_type_is_named(answer, caplog):
    policy = migration_guard(answer)
    assert policy.migration(MIGRATING) is None
    assert policy.fallbacks == 1
    assert f"fuse_migration returned {answer!r}; allowed: Migration, or None" in caplog.text


def stuck(*ranks):
    return replace(MIGRATING, replicas=tuple(replace(r, unmovable=int(r.rank in ranks)) for r in MIGRATING.replicas))


def test_replicas_with_requests_that_cannot_move_are_spared_whatever_a_policy_says():
    policy = migration_guard(Migration((0,), "acme"))
    spared = policy.migration(stuck(2))
    assert (spared, spared.cause) == (Migration((0, 2)), "acme")
    assert policy.migration(stuck(1, 2)) is None
    assert policy.migration(stuck(3)) == Migration((0,)), "it takes no requests"
    assert policy.fallbacks == 0


def test_a_good_answer_passes_through():
    policy = guard(["g_0_0", "g_1_0"])
    assert policy.infer_next(VIEW, LANE) == ["g_0_0", "g_1_0"]
    assert policy.fallbacks == 0


@pytest.mark.parametrize("nothing", [None, []])
def test_a_lane_may_be_left_idle(nothing: list | None):
    policy = guard(nothing)
    assert not policy.infer_next(VIEW, LANE)
    assert not policy.train_next(COMPLETE, LANE)
    assert policy.fallbacks == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("policy broke"), "policy broke"),
        (["g_0_0"], "1 samples for lane 'train'; allowed: multiples of 2"),
        (["g_0_0", "g_0_0"], "repeated keys"),
        (["g_0_0", "x_0_0"], "x_0_0"),
    ],
)
def test_a_failing_policy_costs_its_step_s_streaming_not_the_run(answer, message, caplog):
    policy = guard(answer)
    policy.begin_step(3)
    assert policy.infer_next(VIEW, LANE) is None
    assert policy.infer_next(VIEW, LANE) is None
    assert policy.fallbacks == 1, "asked once, then left alone for the rest of the step"
    assert "fuse_infer_next failed in step 3" in caplog.text
    assert message in caplog.text
    policy.begin_step(4)
    policy.infer_next(VIEW, LANE)
    assert policy.fallbacks == 2


# Two complete groups of two samples; a third group is in work.
COMPLETE = replace(VIEW, complete=tuple(Sample(f"{uid}_{n}_0", uid, 4, 8) for uid in "ab" for n in range(2)))


@pytest.mark.parametrize("keys", [["a_0_0", "a_1_0"], ["b_1_0", "a_0_0", "b_0_0", "a_1_0"]])
def test_whole_groups_are_trained(keys):
    policy = guard(keys)
    assert policy.train_next(COMPLETE, LANE) == keys
    assert policy.fallbacks == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["a_0_0"], "left out a_1_0 of a group it returned; allowed: whole groups"),
        (["b_0_0", "b_1_0", "a_1_0"], "left out a_0_0 of a group"),
        (["a_0_0", "a_1_0", "a_0_0"], "repeated keys"),
        (["a_0_0", "a_1_0", "g_0_0"], "['g_0_0']"),
    ],
)
def test_a_policy_that_does_not_name_whole_groups_each_once_trains_none(answer, message, caplog):
    policy = guard(answer)
    assert policy.train_next(COMPLETE, LANE) is None
    assert policy.fallbacks == 1
    assert message in caplog.text
