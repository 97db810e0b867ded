"""Every pair of the table (table.py): refused before start with a message that names a key, or in a row of two steps
on real verl that holds.

One row and everything at once always run; all of the table's rows with VERL_FUSE_LONG=1, and with stock verl beside
those whose bound comes from it.
"""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from acceptance import checking, refusal
from covering import all_pairs, pairs_of
from judging import Figures, faults, figures, needs_stock
from report import COLUMNS, README, cells_by_row, markdown
from rows import Done, run_row, stock_gap
from table import EVERYTHING, NAMES, REFUSED, Row, default_row, described, refused_pairs, rows, stock_row

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

LONG = os.environ.get("VERL_FUSE_LONG") == "1"
# The critic's own values alone, so that no stream hides the columns that its update reads, with two mini-batches.
FIRST: Row = {**default_row(), "critic": "first"}
SEVERAL = ("critic.ppo_mini_batch_size=3", "critic.ppo_epochs=2")
# A row takes up to two minutes of two cores.
RUN = rows() if LONG else [FIRST]


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
    found = README.read_text()
    for line in markdown([]).splitlines():
        assert line.split(" | – ")[0] in found, line
    assert cells_by_row(found).keys() == {"row", *map(described, rows())}


def test_a_row_that_was_not_run_again_keeps_its_result():
    name, cells = described(rows()[1]), " | ".join(map(str, range(len(COLUMNS))))
    table = markdown([], {name: cells})
    assert f"| {name} | {cells} |" in table.splitlines()
    assert cells_by_row(table)[name] == cells


def result(day: str, *faults: str, gap: float | None = 2e-5) -> dict[str, Any]:
    """What a run of the second row says of itself."""
    found = Figures(48, 48, 0, 1, gap, 1e-5, math.nan, 0.0, 2, 32)
    return {"row": described(rows()[1]), "figures": asdict(found), "faults": faults, "seconds": 86.6, "day": day}


def test_a_row_that_holds_passed_on_that_day_and_one_that_does_not_keeps_the_day_before():
    name = described(rows()[1])
    passed = cells_by_row(markdown([result("2026-11-20")]))
    assert passed[name] == "48/48 | 0, 1 | 2.0e-05, 1.0e-05 | – | 0 | 2 | 32 | 87 | holds | 2026-11-20"
    failed = cells_by_row(markdown([result("2026-11-27", "1 twice", "a|b", gap=None)], passed))
    assert failed[name] == "48/48 | 0, 1 | –, 1.0e-05 | – | 0 | 2 | 32 | 87 | 1 twice; a/b | 2026-11-20"
    never = cells_by_row(markdown([result("2026-11-27", "1 twice")]))
    assert never[name].split(" | ")[-2:] == ["1 twice", "–"]
    again = cells_by_row(markdown([result("2026-11-27", "1 twice"), result("2026-11-28")], passed))
    assert again[name].split(" | ")[-2:] == ["holds", "2026-11-28"]


@pytest.mark.parametrize("row", RUN, ids=described)
def test_a_row_holds(row: Row, verl_home: Path, forks, record_property):
    done = run_row(verl_home, row, forks, more=SEVERAL if row == FIRST else ())
    bound = None
    if LONG and done.code == 0 and needs_stock(row):
        stock = run_row(verl_home, stock_row(row), forks, stock=True)
        assert stock.code == 0, stock.log
        bound = stock_gap(stock)
    found = {"figures": asdict(figures(vars(done))), "faults": faults(vars(done), bound), "seconds": done.seconds}
    record_property("row", json.dumps({"row": described(row), **found}))
    assert found["faults"] == [], done.log


def test_everything_at_once_holds(verl_home: Path, forks, record_property):
    done = run_row(verl_home, EVERYTHING, forks)
    assert done.code == 0, done.log
    # On a busy machine no step's tail may be looked at in time; a row of its own asks that one moves.
    assert [fault for fault in faults(vars(done), None) if "no tail moved" not in fault] == []
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
