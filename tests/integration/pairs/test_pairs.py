"""Every pair of the table (table.py): refused before start with a message that names a key, or in a row of two steps
on real verl that holds.

Six rows always run; all of them with VERL_FUSE_LONG=1, and with stock verl beside those whose bound comes from it.
"""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
from acceptance import checking, refusal
from covering import all_pairs, pairs_of
from judging import faults, figures, needs_stock
from report import cells_by_row, markdown, rows
from rows import Done, run_row, stock_gap
from table import EVERYTHING, NAMES, REFUSED, Row, default_row, described, refused_pairs, stock_row

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

LONG = os.environ.get("VERL_FUSE_LONG") == "1"
# Of the rows that come first, those with most values: a row takes up to two minutes of two cores. The last one has the
# critic's own values alone: no stream hides the columns that its update reads.
RUN = rows() if LONG else [*rows()[1:4], {**default_row(), "critic": "first"}]


@pytest.fixture(scope="module")
def configuration(tmp_path_factory):
    with checking(tmp_path_factory.mktemp("checked")) as config:
        yield config


def test_a_refused_pair_is_refused_before_start_and_the_message_names_the_key(configuration):
    messages = {
        pair: (key, refusal(configuration, {**default_row(), **dict(pair)})) for pair, key in refused_pairs().items()
    }
    assert len(messages) > len(REFUSED)
    assert [pair for pair, (key, message) in messages.items() if key not in (message or "")] == []


def test_all_other_pairs_are_in_rows_that_are_accepted(configuration):
    table = rows()
    assert {pair for row in table for pair in pairs_of(row, NAMES)} == set(all_pairs(NAMES)) - refused_pairs().keys()
    assert {described(row): message for row in table if (message := refusal(configuration, row))} == {}


def test_the_readme_holds_the_table():
    """Figures apart, which are of runs."""
    found = (Path(__file__).parent / "README.md").read_text()
    for line in markdown({}).splitlines():
        assert line.split(" | – ")[0] in found, line


def test_a_row_that_was_not_run_again_keeps_its_result():
    name, cells = described(rows()[1]), " | ".join("123456789")
    table = markdown({}, {name: cells})
    assert f"| {name} | {cells} |" in table.splitlines()
    assert cells_by_row(table)[name] == cells


@pytest.mark.parametrize("row", RUN, ids=described)
def test_a_row_holds(row: Row, verl_home: Path, forks):
    done = run_row(verl_home, row, forks)
    assert done.code == 0, done.log
    bound = None
    if LONG and needs_stock(row):
        stock = run_row(verl_home, stock_row(row), forks, stock=True)
        assert stock.code == 0, stock.log
        bound = stock_gap(stock)
    assert faults(vars(done), bound) == []


def test_everything_at_once_holds(verl_home: Path, forks, record_property):
    done = run_row(verl_home, EVERYTHING, forks)
    assert done.code == 0, done.log
    # On a busy machine no step's tail may be looked at in time; a row of its own asks that one moves.
    assert [fault for fault in faults(vars(done), None) if "no tail moved" not in fault] == []
    assert any(metrics.get("fuse/realloc_bytes", 0) > 0 for metrics in done.metrics.values())
    found = figures(vars(done))
    assert (found.samples, found.expected, found.missing, found.duplicated) == (48, 48, 0, 0)
    assert found.streamed == 48
    record_property("figures", asdict(found))


def test_a_run_that_loses_a_sample_or_differs_does_not_hold():
    """The judgement can fail: one fault at a time, in what a faultless run leaves."""
    row = {**default_row(), "interstage": "slices+tail"}
    record = {
        "samples": 24,
        "expected": 24,
        "duplicated": 0,
        "gap": {"fused": 1e-5, "stock": 1e-5},
        "differences": {"old_log_probs": 1e-6, "values": 1e-6},
        "learned": {"actor/pg_loss": [0.1, 0.1]},
    }
    metrics = {"fuse/streamed_samples": 24, "fuse/migrations": 3, "fuse/overlap_seconds": 0.5}

    def judged(metrics=metrics, missing=0, first=None, **changed):
        account = {"missing": missing}
        steps = ("1", "2")
        done = Done(
            row,
            0,
            1.0,
            {step: {**record, **changed} for step in steps},
            {"1": metrics if first is None else first, "2": metrics},
            dict.fromkeys(steps, account),
        )
        return [fault for fault in faults(vars(done), 1e-5) if not fault.startswith("step 1")]

    nothing = {**metrics, "fuse/streamed_samples": 0}
    assert judged() == judged(first=nothing) == []
    for fault, words in (
        (judged(samples=23, missing=1), "23 of 24 samples, 1 missing"),
        (judged(duplicated=1), "1 twice"),
        (judged(differences={"values": 1e-2}), "values differ"),
        (judged(differences={"values": float("inf")}), "values differ"),
        (judged(learned={"actor/grad_norm": [1.0, 1.1]}), "actor/grad_norm is 1.1, stock's 1"),
        (judged(gap={"fused": 3e-5, "stock": 1e-5}), "twice stock's on the same rollout"),
        (judged(gap={"fused": 3e-5, "stock": 3e-5}), "twice a stock run's"),
        (judged(gap={"fused": None, "stock": 1e-5}), "gap to the rollout None"),
        (judged(metrics={**metrics, "fuse/migrations": 0, "fuse/overlap_seconds": 0.0}), "no tail moved"),
        (judged(metrics=nothing), "no sample was streamed"),
        (judged(metrics={**metrics, "fuse/fallbacks": 1}), "1 policies failed"),
        (judged(metrics={**metrics, "fuse/update_own_values": 1.0}), "or was not asked to"),
        (judged(metrics={**metrics, "fuse/speculation_drafted_tokens": 5}), "5 tokens were drafted"),
    ):
        assert [words in each for each in fault].count(True) == 1, (words, fault)
