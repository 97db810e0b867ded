"""Runs that go on from checkpoints: which step, and one metrics file of all parts."""

import json

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli.earlier import join, move_away, put_back, resumed_step
from verl_fuse.errors import FuseError


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *steps: int, part: str) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": {part: step}}) + "\n" for step in steps))


def parts(path) -> dict[int, str]:
    return {record["step"]: "".join(record["data"]) for record in map(json.loads, path.read_text().splitlines())}


def test_files_of_earlier_runs_are_kept(metrics, tmp_path):
    assert move_away(metrics) is None
    for text in ("first", "second"):
        metrics.write_text(text)
        move_away(metrics)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "metrics.1.jsonl": "first",
        "metrics.2.jsonl": "second",
    }


def test_files_of_a_run_that_made_nothing_give_way_to_the_earlier_ones(metrics, tmp_path):
    config, other = tmp_path / "config.yaml", tmp_path / "other.yaml"
    metrics.write_text("earlier")
    config.write_text("earlier")
    kept = {file: move_away(file) for file in (metrics, config, other)}
    for file in (config, other):
        file.write_text("new")
    put_back(kept)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("metrics.jsonl", "config.yaml"), "earlier"
    )
    # Where there was no earlier run, what the run wrote stays.
    for file in (metrics, config):
        file.unlink()
    kept = {file: move_away(file) for file in (metrics, config)}
    config.write_text("new")
    put_back(kept)
    assert config.read_text() == "new"


def test_parts_are_joined_up_to_the_steps_each_went_on_after(metrics):
    """Three parts, of which the second was killed before it was joined to the first."""
    write(metrics.with_suffix(".1.jsonl"), 0, 1, 2, 3, 4, part="a")
    write(metrics.with_suffix(".2.jsonl"), 3, 4, 5, 6, part="b")
    write(metrics, 6, 7, part="c")
    join(metrics, 5)
    assert parts(metrics) == {0: "a", 1: "a", 2: "a", 3: "ab", 4: "b", 5: "b", 6: "c", 7: "c"}


def test_a_run_before_the_one_that_began_anew_is_left_out(metrics):
    write(metrics.with_suffix(".1.jsonl"), 1, 2, 3, part="other")
    write(metrics.with_suffix(".2.jsonl"), 1, 2, part="a")
    write(metrics, 3, 4, part="b")
    join(metrics, 2)
    assert parts(metrics) == {1: "a", 2: "a", 3: "b", 4: "b"}


def test_a_part_that_cannot_be_read_is_named_and_nothing_is_changed(metrics):
    metrics.with_suffix(".1.jsonl").write_text('{"step": 1, "da')
    write(metrics, 2, part="b")
    with pytest.raises(FuseError, match=r"metrics\.1\.jsonl, line 1: not a metrics record"):
        join(metrics, 1)
    assert parts(metrics) == {2: "b"}


@pytest.mark.parametrize(
    ("mode", "path", "step"),
    [
        ("auto", None, 4),
        ("disable", None, None),
        ("resume_path", "run/global_step_2", 2),
        ("resume_path", "elsewhere/global_step_2", None),
    ],
)
def test_which_step_a_run_goes_on_after(tmp_path, mode, path, step):
    run_dir = tmp_path / "run"
    (run_dir / "global_step_4").mkdir(parents=True)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("4")
    trainer = {
        "default_local_dir": str(run_dir),
        "resume_mode": mode,
        "resume_from_path": path and str(tmp_path / path),
    }
    assert resumed_step(OmegaConf.create({"trainer": trainer}), run_dir) == step
