"""Tests of the policy, by views and by a recorded step. They need verl-fuse and pytest alone."""

import pytest
from acme_fuse import AcmeConfig, LongestFirst

from verl_fuse.spec.step import Migration
from verl_fuse.testing import SetUpTrainer, hooks, lane, recorded_step, replay, replicas, samples, view


@pytest.fixture
def hook():
    """The policy's hooks, set up as in a run with `fuse.acme.largest_micro_group=4`."""
    hook = hooks(LongestFirst)
    hook.fuse_setup(trainer=SetUpTrainer(blocks={"acme": AcmeConfig(largest_micro_group=4)}))
    return hook


def test_an_idle_lane_gets_the_longest_samples(hook):
    ready = view(samples([3, 9, 1, 7, 5, 8]))
    assert hook.fuse_infer_next(view=ready, lane=lane(multiple=2)) == ["g1_0_0", "g5_0_0", "g3_0_0", "g4_0_0"]
    assert hook.fuse_infer_next(view=view(samples([3])), lane=lane(multiple=2)) is None


def test_a_busy_lane_gets_nothing(hook):
    assert hook.fuse_infer_next(view=view(samples([3, 9])), lane=lane(queued=1)) is None


def test_the_busier_replicas_finish_the_tail(hook):
    tail = view(expected=64, finished=48, replicas=replicas([1, 7, 3, 5]))
    assert hook.fuse_migration(view=tail) == Migration((1, 3))
    assert hook.fuse_migration(view=view(expected=64, finished=47, replicas=tail.replicas)) is None
    crowded = view(expected=64, finished=48, replicas=replicas([1, 7, 3, 5], slots=4))
    assert hook.fuse_migration(view=crowded) is None


def test_inference_runs_while_the_tail_generates():
    # Three replicas are done early, the fourth has two long responses. Of a run: replay(LongestFirst, RUN_DIR).
    step = recorded_step([[20] * 8, [25] * 8, [30] * 8, [20] * 6 + [90, 150]])
    found = replay(LongestFirst, step, block=AcmeConfig(largest_micro_group=4))
    ((_, survivors),) = found.moves
    assert 3 in survivors
    assert found.calls
    assert found.seconds < found.without
