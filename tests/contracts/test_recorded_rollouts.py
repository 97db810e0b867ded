"""verl records rollouts where trials of `tune` look for them, and in an order that tells what recording took."""

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli import trials
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.tuned import base_of_recipe
from verl_fuse.tune.search import Request
from verl_fuse.tune.trial import Outcome

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
# The recorder reads a batch for so many seconds.
READS = 0.3


@pytest.mark.parametrize("project", ["verl-fuse", "group/project"])
def test_what_recording_took_is_in_no_seconds_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str
):
    import torch
    import transfer_queue
    from verl.utils.skip.rollout_skip import RolloutTqSkip

    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    monkeypatch.setattr(
        transfer_queue, "kv_batch_get", lambda **asked: time.sleep(READS) or {"x": torch.zeros(1)}, raising=False
    )
    base, request = (
        base_of_recipe(find_recipe("grpo-cpu"), (f"trainer.project_name={project}",)),
        Request((), 2, 60.0, records=True),
    )
    config = trials.planned(base, tmp_path, 1, request).config
    recorder, batch = (
        RolloutTqSkip(config.skip.rollout_tq, OmegaConf.create(OmegaConf.to_container(config, resolve=False))),
        SimpleNamespace(keys=["a"], tags=[{}], partition_id="train"),
    )

    def outcome(launch, limit: float) -> Outcome:
        took = []
        for step in config.skip.rollout_tq.steps:
            begun = time.perf_counter()
            recorder.prepare_data(step, batch, step)
            took.append(time.perf_counter() - begun)
        return Outcome("measured", tuple(2.0 + seconds for seconds in took[trials.WARM_UP :]))

    monkeypatch.setattr(trials, "outcome", outcome)
    found = trials.made(base, tmp_path, 1, request)
    assert trials.has_recorded(base, tmp_path, 2)
    # Of recording's seconds those are left in which the first folder is made and the last line is printed.
    assert len(found.seconds) == 2
    assert all(2.0 - 0.02 <= each < 2.0 + READS / 2 for each in found.seconds)
