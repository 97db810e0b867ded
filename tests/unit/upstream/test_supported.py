"""SUPPORTED.md is what the generator makes of the ledger, and reports become lines of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ci.upstream.supported import LEDGER, Run, added, from_report, page, read
from verl_fuse.errors import FuseError

RUN = Run("0.9.1", "`ab`: ppo-cpu off", "CPU", "2.13.0", "0.28.0", None, "green", "2026-11-20")


def test_the_page_is_generated_from_the_ledger(repo: Path):
    assert (repo / "SUPPORTED.md").read_text() == page(read(LEDGER))


def test_a_line_is_a_run_and_what_took_no_part_has_a_dash():
    lines = page([RUN]).splitlines()
    assert lines[-3:] == [
        "| verl | torch | vLLM | Megatron-core | device | what was run | result | when |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0.9.1 | 2.13.0 | 0.28.0 | – | CPU | `ab`: ppo-cpu off | green | 2026-11-20 |",
    ]


def test_newest_verl_first():
    runs = [replace(RUN, verl=version) for version in ("0.9.1", "0.10.0", "0.9.0")]
    shown = [line.split(" | ")[0] for line in page(runs).splitlines()[-3:]]
    assert shown == ["| 0.10.0", "| 0.9.1", "| 0.9.0"]


def test_a_later_run_of_the_same_takes_the_place_of_an_earlier_one():
    later = replace(RUN, result="ppo-cpu off red", date="2026-11-21")
    other = replace(RUN, torch="2.14.0")
    assert added([RUN, other], later) == [other, later]
    check = replace(RUN, what="`check`: 276 contracts against its source")
    more = replace(check, what="`check`: 280 contracts against its source")
    assert added([check, RUN], more) == [RUN, more]


def test_a_report_of_ab_becomes_a_run(tmp_path: Path):
    report = {
        "versions": {"verl": "0.9.1", "torch": "2.13.0", "vllm": "0.28.0"},
        "compared": [
            {"recipe": "ppo-cpu", "arm": "off", "verdict": "green"},
            {"recipe": "ppo-cpu", "arm": "observe", "verdict": "yellow"},
        ],
    }
    file = tmp_path / "ab.json"
    file.write_text(json.dumps(report))
    run = from_report(file)
    assert run == replace(
        RUN, what="`ab`: ppo-cpu off, ppo-cpu observe", result="ppo-cpu observe yellow", date=run.date
    )


def test_a_report_of_check_becomes_a_run_in_which_nothing_trained(tmp_path: Path):
    file = tmp_path / "upstream.json"
    file.write_text(json.dumps({"verl": "0.9.0", "vllm": "0.31.0", "contracts": 276, "level": "red"}))
    run = from_report(file)
    assert (run.verl, run.what, run.result) == ("0.9.0", "`check`: 276 contracts against its source", "red")
    assert (run.device, run.torch, run.vllm, run.megatron_core) == (None, None, "0.31.0", None)


@pytest.mark.parametrize("text", ["", "[]", '{"compared": []}', '{"contracts": 3}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FuseError, match=r"x\.json is no report"):
        from_report(tmp_path / "x.json")


def test_an_entry_that_is_no_run_is_named(tmp_path: Path):
    (tmp_path / "ledger.json").write_text('[{"verl": "0.9.1"}]')
    with pytest.raises(FuseError, match="entry 0"):
        read(tmp_path / "ledger.json")
