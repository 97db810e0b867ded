from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse.host.upstream.checkpoints import resumed_from, saved_at, step_of, to_resume


def config(**trainer):
    return OmegaConf.create({"trainer": {"default_local_dir": "runs/mine", "resume_mode": "auto", **trainer}})


def test_a_checkpoint_is_where_verl_writes_it():
    assert saved_at(config(), 12) == Path.cwd() / "runs/mine/global_step_12"


def test_a_run_goes_on_from_its_own_folder_or_the_one_it_is_told():
    assert resumed_from(config(), 12) == Path.cwd() / "runs/mine/global_step_12"
    told = config(resume_mode="resume_path", resume_from_path="/old/global_step_7")
    assert resumed_from(told, 7) == Path("/old/global_step_7")


def test_a_run_from_the_start_goes_on_from_nothing():
    assert resumed_from(config(), 0) is None


def test_a_run_that_is_about_to_start_goes_on_from_the_newest_checkpoint(tmp_path):
    def found(mode, **more):
        trainer = {"resume_mode": mode, "default_local_dir": str(tmp_path), **more}
        return to_resume(OmegaConf.create({"trainer": trainer}))

    assert found("auto") is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert found("auto") is None, "verl starts anew where the folder is gone"
    (tmp_path / "global_step_12").mkdir()
    (tmp_path / "global_step_20").mkdir()
    assert found("auto") == tmp_path / "global_step_12"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12 of")
    assert found("auto") is None, "a damaged file names none"
    assert found("disable") is None
    assert found("resume_path", resume_from_path="/old/global_step_7") == Path("/old/global_step_7")
    assert found("resume_path", resume_from_path=None) is found("resume_path", resume_from_path=7) is None


@pytest.mark.parametrize(
    ("folder", "step"),
    [
        ("/runs/global_step_12", 12),
        ("/global_step_3/global_step_12", 12),
        ("/runs/global_step_12/", None),
        ("/runs/global_step_12/actor", None),
        ("/runs/global_step_", None),
        ("/runs/12", None),
    ],
)
def test_the_step_of_a_checkpoint_is_the_end_of_its_path(folder, step):
    assert step_of(folder) == step


@pytest.mark.parametrize("content", [b"", b"four", b"\xff", b"9" * 5000, None])
def test_a_damaged_file_of_the_newest_step_names_no_checkpoint(tmp_path, content):
    (tmp_path / "global_step_4").mkdir()
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    newest.write_text("4")
    assert to_resume(config(default_local_dir=str(tmp_path))) == tmp_path / "global_step_4"
    newest.unlink()
    if content is not None:
        newest.write_bytes(content)
    assert to_resume(config(default_local_dir=str(tmp_path))) is None
