"""A run chooses its critic's devices when it starts: a new run has none, and the run that goes on from its checkpoint
has those that the checkpoint's knowledge asks for, with the critic that two ranks saved."""

import os
from collections import deque

import numpy as np
import pytest
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_placement.learned import KEPT, StepParts

pytest.importorskip("torch")
pytest.importorskip("verl")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not os.environ.get("VERL_FUSE_LONG"), reason="VERL_FUSE_LONG is not set"),
]

SAVED, STEPS = 2, 4
AUTO = ("fuse.placement.critic=auto", "fuse.elastic.enabled=true", "trainer.resume_mode=auto")


def steps(home, forks, last: int) -> Finished:
    settings = (*SMALL, *SMALL_CRITIC, *AUTO, f"trainer.save_freq={SAVED}", f"trainer.total_training_steps={last}")
    done = run(home, "ppo-cpu", *settings, name="chosen", forks=forks)
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def new(verl_home, forks) -> tuple[Finished, dict]:
    done = steps(verl_home, forks, SAVED)
    return done, done.metrics


@pytest.fixture(scope="module")
def gone_on(verl_home, forks, new) -> Finished:
    """After the checkpoint's knowledge was replaced by that of a step with a long tail and a large critic."""
    checkpoint = verl_home / f"chosen/global_step_{SAVED}"
    known = KEPT.load(checkpoint, devices=1)
    assert (known.replicas, known.memory.device) == (2, None)
    assert known.memory.parameters > 0
    rows = np.array([(9, 20)] * 7 + [(9, 600)])
    known.steps = deque([(rows, StepParts(2, 12.0, 2.0, 16.0, 1.0, 1.0))])
    known.decode = DecodeCost(0.02, 0.0005)
    known.save(checkpoint, devices=1)
    return steps(verl_home, forks, STEPS)


def timeline(done: Finished, step: int) -> Timeline:
    return Timeline.from_json((done.folder / f"timeline/step_{step:06d}.json").read_text())


def tracks(done: Finished, step: int, name: str) -> set[str]:
    return {s.track for s in timeline(done, step).spans if s.name == name and s.track.split()[0] in ("rank", "replica")}


def test_a_new_run_has_its_critic_beside_the_actor(new):
    done, metrics = new
    assert "fuse.placement.critic=auto: the critic is beside the actor; no step of this run has been" in done.output
    assert [metrics[step]["fuse/placement_devices"] for step in (1, 2)] == [0, 0]
    assert tracks(done, 2, "update_critic") == {"rank 0", "rank 1"}
    assert tracks(done, 2, "request") == {"replica 0", "replica 1"}


def test_the_run_that_goes_on_has_the_devices_it_chose(gone_on):
    assert "fuse.placement.critic=auto: the critic is on device 1; seconds of a step predicted from 1" in gone_on.output
    for step in range(SAVED + 1, STEPS + 1):
        assert gone_on.metrics[step]["fuse/placement_devices"] == 1
        assert gone_on.metrics[step]["fuse/placement_predicted_seconds"] > 0
        assert tracks(gone_on, step, "values") == {"rank 1"}
        assert tracks(gone_on, step, "request") == {"replica 0"}
    assert gone_on.metrics[STEPS]["fuse/placement_update_seconds"] > 0
    assert gone_on.metrics[STEPS]["critic/vf_loss"] > 0
