"""The checkpoint that a run goes on from: one that verl cannot find, and one that has all steps."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.host.start.resumption import nothing_left, resume_refusals, step_refusals
from verl_fuse.spec.block import quoted

pyarrow = pytest.importorskip("pyarrow")
NEWEST = "latest_checkpointed_iteration.txt"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def run_dir(tmp_path):
    """A run that has checkpoints of steps 8 and 12, with 9 prompts as its data."""
    import pyarrow.parquet

    run_dir = tmp_path / "run"
    for step in (8, 12):
        (run_dir / f"global_step_{step}").mkdir(parents=True)
    (run_dir / NEWEST).write_text("12")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list(range(9))}), tmp_path / "train.parquet")
    return run_dir


def configuration(run_dir, **trainer):
    """Four steps an epoch, if no prompt is too long."""
    return OmegaConf.create(
        {
            "data": {"train_files": str(run_dir.parent / "train.parquet"), "train_batch_size": 2},
            "trainer": {
                "default_local_dir": str(run_dir),
                "resume_mode": "auto",
                "resume_from_path": None,
                "total_training_steps": None,
                "total_epochs": 100,
                **trainer,
            },
        }
    )


def refused(run_dir, **trainer) -> list[str]:
    return list(map(str, resume_refusals(configuration(run_dir, **trainer))))


def test_a_checkpoint_that_is_there_is_not_refused(run_dir):
    assert refused(run_dir, resume_mode="resume_path", resume_from_path=f"{run_dir}/global_step_8") == []
    assert refused(run_dir) == []
    (run_dir / NEWEST).unlink()
    assert refused(run_dir) == []


def test_a_checkpoint_that_is_not_there_is_refused_with_those_beside_it(run_dir):
    path = f"{run_dir}/global_step_9"
    assert refused(run_dir, resume_mode="resume_path", resume_from_path=path) == [
        f"trainer.resume_from_path={path!r}: there is no such folder; beside it: global_step_12, global_step_8. Needs "
        ".../global_step_N, N the number of its step, or trainer.resume_mode=disable"
    ]
    (said,) = refused(run_dir, resume_mode="resume_path", resume_from_path="/nowhere/global_step_9")
    assert "beside it: no checkpoint" in said


@pytest.mark.parametrize("name", ["best", "global_step_8/", "global_step_8/actor", "global_step_last", None, 8])
def test_a_name_without_the_number_of_a_step_is_refused(run_dir, name):
    path = f"{run_dir}/{name}" if isinstance(name, str) else name
    assert refused(run_dir, resume_mode="resume_path", resume_from_path=path) == [
        f"trainer.resume_from_path={quoted(path)}: trainer.resume_mode=resume_path needs the folder of a checkpoint, "
        ".../global_step_N, N the number of its step"
    ]
    assert refused(run_dir, resume_from_path=path) == [], "verl reads the key with resume_path alone"


@pytest.mark.parametrize("where", ["key", "variable"])
def test_a_driver_that_joins_a_cluster_may_not_see_the_checkpoint(run_dir, monkeypatch, where):
    config = configuration(run_dir, resume_mode="resume_path", resume_from_path="/there/global_step_9")
    assert len(list(resume_refusals(config))) == 1
    if where == "key":
        OmegaConf.update(config, "ray_kwargs.ray_init.address", "auto", force_add=True)
    else:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(resume_refusals(config)) == []
    config.trainer.resume_from_path = "/there/best"
    assert len(list(resume_refusals(config))) == 1
    config.trainer.merge_with({"resume_mode": "auto", "total_training_steps": 12})
    assert nothing_left(config) is None
    (run_dir / NEWEST).write_text("")
    assert list(resume_refusals(config)) == []


@pytest.mark.parametrize("mode", ["resume", None, True])
def test_another_mode_is_refused(run_dir, mode):
    (said,) = refused(run_dir, resume_mode=mode)
    assert said == f"trainer.resume_mode={quoted(mode)}: needs one of auto, disable, resume_path"


def test_a_damaged_file_of_the_newest_step_is_named(run_dir):
    (run_dir / NEWEST).write_text("")
    (said,) = refused(run_dir)
    assert said == (
        f"trainer.resume_mode='auto': {run_dir / NEWEST}: cannot be read: invalid literal for int() with base 10: "
        "'': needs disable, or resume_path and trainer.resume_from_path"
    )
    assert refused(run_dir, resume_mode="disable") == []


def test_the_trainer_before_v1_is_left_alone(run_dir):
    assert refused(run_dir, resume_mode="resume", use_v1=False) == []
    assert nothing_left(configuration(run_dir, total_training_steps=12, use_v1=False)) is None


def test_a_run_with_all_its_steps_has_nothing_left(run_dir):
    assert nothing_left(configuration(run_dir, total_training_steps=12)) == (
        f"nothing is left to do: {run_dir}/global_step_12 is the checkpoint of step 12, and the run ends with "
        "trainer.total_training_steps=12. Larger values go on from there, trainer.resume_mode=disable starts anew, and "
        "trainer.val_only=true validates"
    )
    assert nothing_left(configuration(run_dir, total_training_steps=13)) is None
    earlier = {"resume_mode": "resume_path", "resume_from_path": f"{run_dir}/global_step_8"}
    assert nothing_left(configuration(run_dir, total_training_steps=12, **earlier)) is None
    assert f"{run_dir}/global_step_8 is" in (
        nothing_left(configuration(run_dir, total_training_steps=8, **earlier)) or ""
    )


def test_epochs_end_a_run_too(run_dir):
    said = nothing_left(configuration(run_dir, total_epochs=3))
    assert said is not None
    assert "the run ends with trainer.total_epochs=3 (of 4 steps). " in said
    assert nothing_left(configuration(run_dir, total_epochs=4)) is None
    both = nothing_left(configuration(run_dir, total_epochs=3, total_training_steps=10))
    assert both is not None
    assert "trainer.total_training_steps=10 and trainer.total_epochs=3 (of 4 steps)" in both
    # Without the number of prompts nobody knows.
    (run_dir.parent / "train.parquet").unlink()
    assert nothing_left(configuration(run_dir, total_epochs=3)) is None


@pytest.mark.parametrize("more", [{"resume_mode": "disable"}, {"val_only": True}, {"total_training_steps": None}])
def test_a_run_that_starts_anew_only_validates_or_has_steps_left_goes_on(run_dir, more):
    assert nothing_left(configuration(run_dir, **{"total_training_steps": 12, **more})) is None


def test_a_run_without_a_checkpoint_has_everything_left(tmp_path):
    assert nothing_left(configuration(tmp_path / "run", total_training_steps=0)) is None


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"total_training_steps": -1}, "trainer.total_training_steps=-1: trains no step: needs >= 1, or null for"),
        ({"total_training_steps": 0}, "trainer.total_training_steps=0: trains no step: needs >= 1, or null for"),
        ({"total_epochs": 0}, "trainer.total_epochs=0: trains no step: needs > 0; "),
    ],
)
def test_a_run_without_a_step_is_refused(tmp_path, trainer, message):
    (refusal,) = step_refusals(configuration(tmp_path, val_before_train=False, **trainer))
    # Stock verl validates, and ends.
    assert not list(step_refusals(configuration(tmp_path, **trainer)))
    assert str(refusal).startswith(message)
    assert str(refusal).endswith("trainer.val_only=true validates alone")
    assert list(step_refusals(configuration(tmp_path, **trainer, val_only=True))) == []
    assert list(step_refusals(configuration(tmp_path, **trainer, use_v1=False))) == []


@pytest.mark.parametrize("trainer", [{}, {"total_training_steps": 1}, {"total_epochs": 1}])
def test_a_run_with_a_step_is_not_refused(tmp_path, trainer):
    assert list(step_refusals(configuration(tmp_path, **trainer))) == []
