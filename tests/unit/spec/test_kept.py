"""`Kept`, used like in every plugin that keeps knowledge; each plugin's knowledge is tested with the plugin."""

import json
import logging
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.kept import Kept, amount, token_pairs, whole

KEPT = Kept("acme", lambda lengths, costs: (lengths["mean"], costs and amount(costs["step"])))


def test_what_was_saved_is_loaded(tmp_path: Path, caplog):
    KEPT.save(tmp_path, {"mean": 7}, {"step": 0.5}, devices=2)
    assert [file.name for file in tmp_path.iterdir()] == ["fuse_acme.json"]
    assert KEPT.load(tmp_path, devices=2) == (7, 0.5)
    assert not caplog.records


def test_costs_are_of_replicas_of_so_many_devices(tmp_path: Path, caplog):
    KEPT.save(tmp_path, {"mean": 7}, {"step": 0.5}, devices=2)
    assert KEPT.load(tmp_path, devices=4) == (7, None)
    message = "its costs were measured on replicas of 2 devices, this run's have 4: fuse.acme measures them anew"
    assert message in caplog.text


def test_a_new_run_and_a_checkpoint_without_the_file_begin_anew(tmp_path: Path, caplog):
    assert KEPT.load(None, devices=1) is None
    assert not caplog.records
    assert KEPT.load(tmp_path, devices=1) is None
    assert f"{tmp_path / 'fuse_acme.json'} is not there: fuse.acme learns lengths and costs anew" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 9, "devices": 1, "lengths": {"mean": 7}, "costs": null}',
        '{"version": 1, "devices": 1, "lengths": {}, "costs": null}',
        '{"version": 1, "devices": null, "lengths": {"mean": 7}, "costs": null}',
        '{"version": 1, "devices": 1e999, "lengths": {"mean": 7}, "costs": null}',
        '{"version": 1, "devices": 1, "lengths": {"mean": 7}, "costs": {"step": "1"}}',
        '{"version": 1, "devices": 1, "lengths": {"mean": 7}, "costs": {"step": NaN}}',
        '{"version": 1, "devices": 1, "lengths": {"mean": 7}, "costs": {"step": -1}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str):
    (tmp_path / "fuse_acme.json").write_text(text)
    wanted = (
        r"fuse_acme\.json: not what fuse\.acme writes with a checkpoint .* delete it to learn lengths and costs anew"
    )
    with pytest.raises(FuseError, match=wanted):
        KEPT.load(tmp_path, devices=1)


def test_a_disk_that_refuses_costs_the_file_not_the_run(tmp_path: Path, caplog):
    with caplog.at_level(logging.ERROR):
        KEPT.save(tmp_path / "gone", {}, None, devices=1)
    assert "that fuse.acme learned are not in this checkpoint" in caplog.text


def test_the_file_is_json(tmp_path: Path):
    KEPT.save(tmp_path, {"mean": 7}, None, devices=1)
    data = json.loads((tmp_path / "fuse_acme.json").read_text())
    assert data == {"version": 1, "devices": 1, "lengths": {"mean": 7}, "costs": None}


def test_numbers_of_a_file_are_taken_from_the_bound_on():
    assert (whole(0), whole(4.0, 4), amount(0), amount(2.5)) == (0, 4, 0.0, 2.5)
    assert token_pairs([[0, 3]]).tolist() == [[0, 3]]


@pytest.mark.parametrize("value", [3, -1, 4.5, "4", True, None, [4], float("nan"), float("inf"), 1e400])
def test_what_is_no_whole_number_from_four_on_is_refused(value):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        whole(value, 4)


@pytest.mark.parametrize("rows", [[], [1, 2], [[1, -1]], [[1, 0.5]], [[1, 2, 3]], [[1], [2, 3]], [["1", "2"]], None])
def test_what_are_no_lengths_of_samples_is_refused(rows):
    with pytest.raises(ValueError, match=r"inhomogeneous|pairs of prompt and response tokens"):
        token_pairs(rows)
