import json

import pytest
from rich.console import Console

from verl_fuse.cli.report import Change, StageTime, print_summary, read_metrics, stage_times, validation_changes
from verl_fuse.errors import FuseError

ACC = "val-core/verl_fuse_cpu/euclid/acc/mean@1"
RECORDS = [
    {"step": 0, "data": {ACC: 0.4, "note": "text"}},
    {"step": 1, "data": {"timing_s/step": 9.0, "timing_s/gen": 8.0}},
    {"step": 2, "data": {"timing_s/step": 2.0, "timing_s/gen": 1.0}},
    {"step": 3, "data": {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/testing": 1.0, ACC: 0.7}},
]


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def test_validation_before_and_after(metrics):
    assert validation_changes(read_metrics(metrics)) == [Change(ACC, before=0.4, after=0.7, first_step=0, last_step=3)]


def test_step_times_leave_out_the_first_step(metrics):
    assert stage_times(read_metrics(metrics)) == (
        2,
        [StageTime("gen", 1.5), StageTime("step", 3.0), StageTime("testing", 0.5)],
    )


def test_a_single_step_is_counted():
    assert stage_times([(1, {"timing_s/step": 9.0})]) == (1, [StageTime("step", 9.0)])


def test_the_summary_names_what_exists(metrics, tmp_path):
    console = Console(width=120, record=True, quiet=True)
    console.quiet = False
    with console.capture() as shown:
        print_summary(console, tmp_path, metrics, tmp_path / "timeline.html")
    text = shown.get()
    assert "0.400 (step 0)" in text
    assert "0.700 (step 3)" in text
    assert "+0.300" in text
    assert f"Metrics: {metrics}" in text
    assert "Timeline" not in text


def test_a_torn_line_is_named(metrics):
    with metrics.open("a") as file:
        file.write('{"step": 4, "da')
    with pytest.raises(FuseError, match=r"metrics\.jsonl, line 5: not a metrics record"):
        read_metrics(metrics)
