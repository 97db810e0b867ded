"""Step records of real runs, cut short: what must be equal is found equal, and each planted fault is found."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from records_of_runs import changed, load, slower

from ci.upstream.ab.arms import ARMS, STREAMING
from ci.upstream.ab.compare import Bands, Expected, Finding, compare, difference, quantity_difference
from ci.upstream.ab.record import Record
from ci.upstream.ab.report import Compared, Report
from verl_fuse.host.start.compat.judge import Level

BANDS = Bands(replayed=1.3, live=1.5, memory=1.1)
EXACT = Expected(None, None, BANDS)
NEAR = Expected(None, STREAMING, BANDS)


@pytest.fixture
def stock() -> Record:
    return load("stock")


@pytest.fixture
def observe() -> Record:
    return load("observe")


@pytest.fixture
def streaming() -> Record:
    return load("streaming")


def faults(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.what) for finding in findings if not finding.passed]


def test_the_records_hold_replayed_and_live_steps(stock):
    assert sorted(stock.replayed) == [1, 2, 3]
    assert sorted(stock.live) == [7, 8]


def test_observing_is_equal_to_the_bit(stock, observe):
    findings = compare(stock, observe, EXACT)
    assert faults(findings) == []
    assert {finding.value for finding in findings if finding.kind in ("numbers", "metrics")} == {0.0}
    assert {"values", "actor parameters", "actor/pg_loss"} <= {finding.what for finding in findings}


def test_streaming_is_equal_within_its_tolerance_and_not_to_the_bit(stock, streaming):
    assert faults(compare(stock, streaming, NEAR)) == []
    assert ("numbers", "values") in faults(compare(stock, streaming, EXACT))


def test_memory_that_verl_logs_per_role_is_not_compared_as_a_number(stock, observe):
    left, right = (record.steps[1].metrics["actor/perf/cpu_memory_used_gb"] for record in (stock, observe))
    assert left != right
    assert "actor/perf/cpu_memory_used_gb" not in {f.what for f in compare(stock, observe, EXACT)}


def test_a_slowdown_is_found(stock, observe):
    # A sleep of two seconds in a hook that is called once a step.
    found = faults(compare(stock, slower(observe, 2.0), EXACT))
    assert found == [("time", "median seconds of a replayed step")]


def test_a_slowdown_of_generation_alone_is_found(stock, observe):
    slow = slower(observe, 4.0)
    only_live = {**observe.steps, **slow.live}
    found = faults(compare(stock, replace(observe, steps=only_live), EXACT))
    assert found == [("time", "median seconds of a generating step")]


def test_a_disturbed_stock_run_hides_no_slowdown(stock, observe):
    disturbed, slow = slower(stock, 2.0), slower(observe, 2.0)
    assert faults(compare(disturbed, slow, EXACT)) == []
    found = faults(compare(disturbed, slow, EXACT, [stock]))
    assert found == [("time", "median seconds of a replayed step")]


def test_one_slow_step_is_not_a_slowdown(stock, observe):
    for record in (stock, observe):
        assert sorted(record.replayed) == [1, 2, 3]
    usual, slow = (
        replace(record, steps={**record.steps, 4: record.steps[3], 2: replace(record.steps[2], seconds=seconds)})
        for record, seconds in ((stock, 3.0), (observe, 60.0))
    )
    assert faults(compare(usual, slow, EXACT)) == []


def test_the_first_step_warms_up_and_is_not_counted(stock, observe):
    assert faults(compare(stock, changed(observe, 1, seconds=60.0), EXACT)) == []


def test_the_last_step_has_no_known_time(stock, observe):
    assert faults(compare(stock, changed(observe, 8, seconds=None), EXACT)) == []


def test_times_that_nobody_knows_are_a_fault(stock, observe):
    unknown = replace(observe, steps={number: replace(step, seconds=None) for number, step in observe.steps.items()})
    assert [kind for kind, _ in faults(compare(stock, unknown, EXACT))] == ["time", "time"]


def test_more_memory_is_found(stock, observe):
    found = faults(compare(stock, replace(observe, peak_bytes=int(1.2 * stock.peak_bytes)), EXACT))
    assert found == [("memory", "peak memory of all processes")]


@pytest.mark.parametrize("arm", ["observe", "streaming"])
@pytest.mark.parametrize("quantity", ["advantages", "actor parameters", "critic parameters"])
def test_a_numeric_fault_is_found_and_located(stock, arm: str, quantity: str):
    right = load(arm)
    item, values = next(iter(right.steps[2].numbers[quantity].items()))
    wrong = changed(
        right, 2, numbers={quantity: {**right.steps[2].numbers[quantity], item: values * np.float32(1.001)}}
    )
    (fault,) = [
        f for f in compare(stock, wrong, replace(EXACT, tolerance=ARMS[arm].expected.tolerance)) if not f.passed
    ]
    assert (fault.kind, fault.what, fault.where) == ("numbers", quantity, f"step 2, {item}")


def test_a_wrong_metric_is_found(stock, streaming):
    wrong = changed(streaming, 3, metrics={"actor/pg_loss": streaming.steps[3].metrics["actor/pg_loss"] * 1.01})
    assert faults(compare(stock, wrong, NEAR)) == [("metrics", "actor/pg_loss")]


def test_the_tolerance_is_tighter_before_parameters_change(stock, streaming):
    def off_by(step: int, amount: float) -> Record:
        rows = streaming.steps[step].numbers["values"]
        return changed(streaming, step, numbers={"values": {**rows, "0": rows["0"] + np.float32(amount)}})

    assert faults(compare(stock, off_by(1, 3e-5), NEAR)) == [("numbers", "values")]
    assert faults(compare(stock, off_by(2, 3e-5), NEAR)) == []


def test_other_rollouts_are_a_fault_even_with_a_tolerance(stock, streaming):
    rows = streaming.steps[1].numbers["rm_scores"]
    other = changed(streaming, 1, numbers={"rm_scores": {**rows, "0": rows["0"] + np.float32(1e-6)}})
    assert faults(compare(stock, other, NEAR)) == [("numbers", "rm_scores")]


def test_a_quantity_a_row_or_a_metric_that_only_one_run_has_is_a_fault(stock, observe):
    step = observe.steps[1]
    without = {name: rows for name, rows in step.numbers.items() if name != "values"}
    steps = {**observe.steps, 1: replace(step, numbers=without)}
    assert faults(compare(stock, replace(observe, steps=steps), NEAR)) == [("numbers", "values")]
    assert faults(compare(replace(stock, steps=steps), observe, NEAR)) == [("numbers", "values")]
    row = changed(observe, 1, numbers={"values": {"0": step.numbers["values"]["0"]}})
    assert faults(compare(stock, row, NEAR)) == [("numbers", "values")]
    loss = changed(observe, 1, metrics={"critic/new_loss": 0.0})
    assert faults(compare(stock, loss, NEAR)) == [("metrics", "critic/new_loss")]


def test_rollouts_that_nobody_recorded_are_a_fault(stock, observe):
    def without(record: Record) -> Record:
        numbers = {name: rows for name, rows in record.steps[1].numbers.items() if name != "responses"}
        return replace(record, steps={**record.steps, 1: replace(record.steps[1], numbers=numbers)})

    assert faults(compare(without(stock), without(observe), EXACT)) == [("numbers", "responses")]


def test_a_missing_step_is_a_fault(stock, observe):
    short = replace(observe, steps={number: step for number, step in observe.steps.items() if number != 8})
    assert faults(compare(stock, short, EXACT)) == [("run", "steps that only one run has")]


def test_a_run_in_which_verl_fuse_did_nothing_is_a_fault(stock, observe):
    on = replace(EXACT, sign="fuse/streamed_samples")
    assert faults(compare(stock, observe, on)) == [("run", "replayed steps without fuse/streamed_samples")]
    at_work = replace(
        observe,
        steps={
            number: replace(step, metrics={**step.metrics, "fuse/streamed_samples": 16.0})
            for number, step in observe.steps.items()
        },
    )
    assert faults(compare(stock, at_work, on)) == []
    idle = changed(at_work, 3, metrics={"fuse/streamed_samples": 0.0})
    (fault,) = [finding for finding in compare(stock, idle, on) if not finding.passed]
    assert (fault.what, fault.where) == ("replayed steps without fuse/streamed_samples", "3")


def test_verl_fuse_at_work_though_it_is_off_is_a_fault(stock, observe):
    meddling = changed(observe, 2, metrics={"fuse/fallbacks": 0.0})
    assert faults(compare(stock, meddling, EXACT)) == [("run", "steps with metrics of verl-fuse, which is off")]


def test_nothing_replayed_is_a_fault(stock, observe):
    live = [replace(record, steps=record.live) for record in (stock, observe)]
    assert ("run", "no replayed step to compare") in faults(compare(*live, EXACT))


@pytest.mark.parametrize(
    ("code", "text"), [(1, "observe ended with exit code 1"), (None, "observe did not end in time")]
)
def test_a_failed_run_is_a_fault_and_nothing_else_is_said_of_it(stock, observe, code: int | None, text: str):
    assert faults(compare(stock, replace(observe, code=code), EXACT)) == [("run", text)]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, 1.0], [math.nan, 1.5], 0.5),
        ([math.nan], [0.0], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [0.0], math.inf),
        ([0.0], [-0.0], math.ulp(0.0)),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_difference(left: list[float], right: list[float], expected: float):
    assert difference(np.asarray(left, np.float32), np.asarray(right, np.float32)) == expected


def test_another_type_is_another_number():
    assert difference(np.ones(1, np.float32), np.ones(1, np.float64)) == math.inf


def test_the_item_with_the_largest_difference_is_named():
    ones = np.ones(2, np.float32)
    assert quantity_difference({"a": ones, "b": ones}, {"a": ones, "b": ones * 2}) == (1.0, "b")
    assert quantity_difference({}, {}) == (math.inf, "nothing")


def report(stock: Record, *runs: tuple[str, Record]) -> Report:
    compared = [Compared("ppo-cpu", arm, tuple(compare(stock, run, EXACT))) for arm, run in runs]
    return Report({"verl": "0.9.1", "torch": "2.13.0", "vllm": None}, {"cores": "2"}, compared)


def test_time_alone_is_yellow_and_numbers_are_red(stock, observe):
    assert report(stock, ("observe", observe)).verdict is Level.GREEN
    slow = slower(observe, 2.0)
    assert report(stock, ("off", observe), ("observe", slow)).verdict is Level.YELLOW
    wrong = changed(slow, 1, metrics={"actor/pg_loss": 0.0})
    assert report(stock, ("off", observe), ("observe", wrong)).verdict is Level.RED


def test_the_report_for_people_starts_with_what_is_wrong(stock, observe):
    text = report(stock, ("observe", changed(observe, 2, metrics={"actor/pg_loss": 0.25}))).as_markdown()
    assert text.startswith("# A/B against stock verl 0.9.1: red\n")
    assert "- vllm: not there" in text
    table = text[text.index("| compared") :].splitlines()
    assert table[2].startswith("| **fault** actor/pg_loss | 0.293 | exact | step 2 |")
    assert "| values | exact | exact |  |" in table
    assert "| 2 metrics of verl | exact | exact |  |" in table


def test_the_report_tells_of_a_first_run_that_was_slower(stock, observe):
    first = tuple(compare(stock, slower(observe, 2.0), EXACT))
    second = replace(report(stock, ("observe", observe)).compared[0], first=first)
    text = Report({"verl": "0.9.1"}, {}, [second]).as_markdown()
    assert text.startswith("# A/B against stock verl 0.9.1: green\n")
    assert "Run twice, this is the second time. The first time: median seconds of a replayed step 1.6 x." in text


def test_the_report_for_programs_is_plain_json(stock, observe):
    rows = observe.steps[1].numbers["values"]
    broken = changed(observe, 1, numbers={"values": {**rows, "0": rows["0"] * np.float32(math.nan)}})
    found = json.loads(json.dumps(report(stock, ("observe", broken)).as_dict(), allow_nan=False))
    (one,) = found["compared"]
    assert (found["verdict"], one["recipe"], one["arm"], one["verdict"]) == ("red", "ppo-cpu", "observe", "red")
    (fault,) = [finding for finding in one["findings"] if not finding["passed"]]
    assert (fault["what"], fault["value"], fault["where"]) == ("values", "inf", "step 1, 0")


def test_an_infinite_metric_is_equal_to_nothing_but_itself(stock, streaming):
    left, right = (changed(record, 1, metrics={"critic/vf_loss": math.inf}) for record in (stock, streaming))
    assert faults(compare(left, right, NEAR)) == []
    for pair in ((left, streaming), (stock, right)):
        assert faults(compare(*pair, NEAR)) == [("metrics", "critic/vf_loss")]
