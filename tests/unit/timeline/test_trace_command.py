"""`verl-fuse trace RUN_DIR`."""

import json
import sys
import warnings
from pathlib import Path

import pytest
from synthetic import synthetic_timeline

from verl_fuse.cli.main import main
from verl_fuse.timeline.files import read_step, record_step
from verl_fuse.timeline.idle import idle_table


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    for step in (1, 2):
        record_step(tmp_path, synthetic_timeline(step=step, seed=step))
    return tmp_path


def trace(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["trace", *map(str, arguments)])
    assert exit.value.code == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_the_last_step_is_shown_with_its_page(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    shown = trace(capsys, run_dir)
    assert "ppo-cpu synthetic: step 2, " in shown
    for text in ("device 0", "device 1", "replica 1", "rank 1", "lane train", "update", "generate", "Devices idle: "):
        assert (text in shown) is (text != "update")
    assert shown.rstrip().endswith(f"Page: {run_dir}/timeline/step_000002.html")


def test_another_step_and_the_mean_of_all(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert f"Page: {run_dir}/timeline/step_000001.html" in trace(capsys, run_dir, "--step", "1")
    shown = trace(capsys, run_dir, "--all")
    assert "mean of 2 steps (1 to 2)" in shown
    assert f"Page: {run_dir}/timeline.html" in shown
    (replica,) = [line for line in shown.splitlines() if line.startswith("│ replica 0")]
    assert replica.split("│")[4].strip() == "32", "requests of a step, of the 64"


def test_a_page_that_was_not_written_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record_step(tmp_path, synthetic_timeline(), html=False)
    assert "Page: none was written (fuse.observe.html=false" in trace(capsys, tmp_path)


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    timeline = synthetic_timeline()
    record_step(tmp_path, type(timeline)("[red]run[/]", 1, timeline.start, timeline.end, timeline.spans))
    assert "[red]run[/]: step 1" in trace(capsys, tmp_path)


BAD = {
    "missing": (("nowhere",), "no such directory; needs the directory of a run"),
    "unknown step": (("--step", "9"), "step 9 is not recorded; recorded: 2 steps from 1 to 2"),
    "step and all": (("--step", "1", "--all"), "--step 1 and --all exclude each other"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_end_in_one_message(run_dir: Path, capsys: pytest.CaptureFixture[str], arguments, message: str):
    where = run_dir / "nowhere" if arguments == ("nowhere",) else run_dir
    shown = trace(capsys, where, *(a for a in arguments if a != "nowhere"), code=2)
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"format": 9}', "[" * 10**6])
def test_a_damaged_step_refuses_itself_alone(run_dir: Path, capsys: pytest.CaptureFixture[str], content: str):
    (run_dir / "timeline/step_000002.json").write_text(content)
    for arguments in ((), ("--all",)):
        with pytest.warns(UserWarning, match="a recorded step is skipped: .*step_000002.json: "):
            assert ": step 1, " in trace(capsys, run_dir, *arguments)
    assert "step_000002.json" in trace(capsys, run_dir, "--step", "2", code=2)
    (run_dir / "timeline/step_000001.json").write_text(content)
    assert len(trace(capsys, run_dir, code=2).splitlines()) == 1


def test_what_is_skipped_is_one_plain_line(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / "timeline/step_000001.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest has put its own in the place of what writes warnings to stderr.
        warnings.showwarning = lambda *record: sys.stderr.write(warnings.formatwarning(*record[:4]))
        with pytest.raises(SystemExit) as exit:
            main(["trace", str(run_dir), "--all", "--json"])
    assert exit.value.code == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"verl-fuse: a recorded step is skipped: {run_dir}/timeline/step_000001.json: ")
    assert said.err.count("\n") == 1
    assert json.loads(said.out)["steps"] == [2]


def test_a_page_stands_for_its_run(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for page, step in {"timeline.html": 2, "timeline": 2, "timeline/step_000001.html": 1}.items():
        assert f": step {step}, " in trace(capsys, run_dir / page)
    assert "mean of 2 steps" in trace(capsys, run_dir / "timeline/step_000001.html", "--all")
    assert ": step 2, " in trace(capsys, run_dir / "timeline/step_000001.html", "--step", "2")
    monkeypatch.chdir(run_dir / "timeline")
    assert ": step 1, " in trace(capsys, "step_000001.html")
    (run_dir / "metrics.jsonl").write_text("")
    assert "metrics.jsonl: needs the directory of a run" in trace(capsys, run_dir / "metrics.jsonl", code=2)


def test_json_holds_the_numbers_of_the_tables(
    run_dir: Path, capsys: pytest.CaptureFixture[str], documented_keys: dict[str, set[str]]
):
    data = json.loads(trace(capsys, run_dir, "--json"))
    assert set(data) == documented_keys["trace"]
    timeline = read_step(run_dir, 2)
    table = idle_table(timeline)
    assert data["step_seconds"] == timeline.end - timeline.start
    assert data["devices_idle_fraction"] == table.overall
    assert [track["track"] for track in data["tracks"]] == [row.track for row in (*table.devices, *table.rows)]
    assert data["tracks"][0]["busy_seconds"] == table.devices[0].busy
    assert data["work_seconds"] == dict(table.categories)
    assert data["page"] == f"{run_dir}/timeline/step_000002.html"
    both = json.loads(trace(capsys, run_dir, "--json", "--all"))
    assert both["steps"] == [1, 2]
    assert {track["track"]: track["spans"] for track in both["tracks"]}["replica 1"] == 32
    assert sum(both["work_seconds"].values()) < 2 * sum(data["work_seconds"].values())
