"""The bench of published steps: its rows are read as documented, faulty rows end it, and its targets are met."""

import json
from pathlib import Path
from typing import Any

import pytest

from ci.bench import published
from verl_fuse.cost.calibration import FRAMEWORK

ROW = {
    "id": "some-8b", "model": "llama-3.1-8b", "device": "h100", "devices": 8, "prompts": 8, "samples": 4,
    "mean_prompt": 150, "mean_response": 400, "limit": 1024, "sigma": 0.6, "minibatches": 2, "reference": True,
    "engine": "megatron", "rollout": "tp1 dp8", "train": "pp2 dp4",
}  # fmt: skip


def run(tmp_path: Path, *rows: Any) -> int:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(list(rows)))
    return published.main(["--rows", str(path)])


def test_the_last_line_has_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, ROW, {**ROW, "id": "other-8b", "engine": "fsdp", "train": "fsdp8"}) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"bench", "rows", "median_error", "rank", "real_over_predicted", "left_out"}
    for found in last["rows"]:
        predicted = found["predicted"]
        assert list(predicted) == ["gen", "old_log_prob", "ref", "update_actor", "update_weights", "step"]
        assert predicted["step"] == pytest.approx(sum(predicted.values()) - predicted["step"], rel=0.01)
    assert last["median_error"] == {"stages": None, "steps": None}
    assert last["left_out"] == {}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"device": "h900"}, "h900"),
        ({"model": "gpt-9"}, "gpt-9"),
        ({"sigma": None}, "sigma"),
        ({"engine": "ddp"}, "engine"),
        ({"train": "pp2 dp2"}, "train"),
        ({"rollout": "tp1 dp4"}, "rollout"),
        ({"rollout": "tp3"}, "rollout"),
        ({"engine": "fsdp"}, "train"),
        ({"train": "dp8 fsdp8"}, "train"),
        ({"devices": 12}, "devices"),
        ({"mean_response": 2000}, "mean_response"),
        ({"mean_response": None}, "mean_response"),
        ({"seconds": {"generation": 3}}, "generation"),
        ({"seconds": {"gen": 0}}, "seconds.gen"),
        ({"reference": False, "seconds": {"old_log_prob+ref": 3}}, "reference"),
        ({"minibatches": 3}, "minibatches"),
        ({"model": "llama-3.1-405b", "train": "pp2 dp4"}, "rollout"),
        ({"seeds": 3}, "seeds"),
    ],
)
def test_a_faulty_row_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], key: str
):
    assert run(tmp_path, ROW, {**ROW, "id": "faulty-8b", **change}) == 2
    told = capsys.readouterr()
    assert "faulty-8b" in told.err
    assert key in told.err
    assert not told.out


def test_a_missing_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, {key: value for key, value in ROW.items() if key != "limit"}) == 2
    assert "missing limit" in capsys.readouterr().err


def test_lengths_have_the_mean_that_the_row_states():
    for mean, limit in ((795, 4096), (5560, 8192), (400, 1024)):
        assert published.cut_lognormal(mean, 0.6, limit).mean == pytest.approx(mean, rel=0.005)


def test_one_mean_is_inferred_for_all_stages():
    (row,) = [row for row in published.read_rows(published.PUBLISHED_ROWS) if row.mean_response is None]
    found = published.prediction(row, FRAMEWORK)
    assert set(found.ratios) == set(row.seconds) - {published.WHOLE_STEP}
    product = 1.0
    for ratio in found.ratios.values():
        product *= ratio
    assert product == pytest.approx(1.0, rel=0.05)


def test_the_published_steps_are_predicted_within_a_quarter():
    rows = published.read_rows(published.PUBLISHED_ROWS)
    assert len(rows) == 8
    found = published.summary([published.prediction(row, FRAMEWORK) for row in rows])
    assert found["median_error"]["stages"] <= 0.25
    assert found["median_error"]["steps"] <= 0.25
    assert found["rank"] >= 0.9
    assert 0.8 <= found["real_over_predicted"] <= 1.25


def test_a_fit_without_a_source_predicts_it():
    """The source with most rows."""
    rows = published.read_rows(published.PUBLISHED_ROWS)
    source = rows[0].group
    floors = published.fitted([row for row in rows if row.group != source])
    ratios = [r for row in rows if row.group == source for r in published.prediction(row, floors).ratios.values()]
    error = published.median(map(published.error, ratios))
    assert error is not None
    assert error <= 0.30
