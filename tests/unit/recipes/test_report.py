import json
import re

import pytest
from rich.console import Console

from verl_fuse.cli.report import Change, logged, print_summary, read_metrics, stage_times, validation_changes
from verl_fuse.compare.run import RunMetrics
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
    assert validation_changes(logged(metrics.parent)) == [Change(ACC, before=0.4, after=0.7, first_step=0, last_step=3)]


def test_step_times_leave_out_the_first_step(metrics):
    count, stages = stage_times(logged(metrics.parent))
    assert (count, [*stages.items()]) == (2, [("gen", 1.5), ("other", 1.5), ("step", 3.0), ("testing", 0.5)])


def test_a_single_step_is_counted():
    assert stage_times(RunMetrics.of("", [(1, {"timing_s/step": 9.0})])) == (1, {"other": 9.0, "step": 9.0})


def test_what_verl_times_of_single_requests_is_no_stage():
    records = [(1, {"timing_s/step": 9.0, "timing_s/gen": 9.0, "timing_s/agent_loop/slowest/generate_sequences": 3.0})]
    assert [*stage_times(RunMetrics.of("", records))[1]] == ["gen", "other", "step"]


def test_shares_add_up_and_what_was_hidden_is_said(tmp_path):
    step = {"timing_s/gen": 5.0, "timing_s/drain": 1.2, "timing_s/update_actor": 2.0, "timing_s/step": 10.0}
    path = tmp_path / "metrics.jsonl"
    records = [{"step": number, "data": {**step, "fuse/overlap_seconds": 0.75}} for number in (1, 2, 3)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = printed(path)
    shares = re.findall(r"^(\w+) +[\d.]+ +(\d+)%", text, re.MULTILINE)
    assert dict(shares) == {"gen": "50", "drain": "12", "update_actor": "20", "other": "18", "step": "100"}
    assert "Hidden: 0.750 s of inference a step ran while samples were still generated." in text
    assert "Validation" not in text, "there was none"


def printed(metrics) -> str:
    console = Console(width=120)
    with console.capture() as shown:
        print_summary(console, metrics)
    return shown.get()


def test_the_summary_shows_validation_and_stages(metrics):
    text = printed(metrics)
    assert "0.400 (step 0)" in text
    assert "0.700 (step 3)" in text
    assert "+0.300" in text
    assert "Step time, mean of 2 steps" in text
    assert "Hidden" not in text


def test_a_single_validation_is_no_change(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "data": {ACC: 0.4}}))
    assert "0.400 (step 0)" in printed(path)
    assert "+0.000" not in printed(path)


def test_a_torn_line_is_named(metrics):
    with metrics.open("a") as file:
        file.write('{"step": 4, "da')
    with pytest.raises(FuseError, match=r"metrics\.jsonl, line 5: not a metrics record"):
        read_metrics(metrics)


def test_an_update_with_its_own_values_is_the_critics_update():
    timed = {"timing_s/step": 3.0, "timing_s/values": 2.0, "fuse/update_own_values": 1.0}
    assert [*stage_times(RunMetrics.of("", [(1, timed)]))[1]] == ["update_critic", "other", "step"]
