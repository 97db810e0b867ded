"""`verl-fuse trace RUN_DIR`."""

from pathlib import Path

import pytest
from synthetic import synthetic_timeline

from verl_fuse.cli.main import main
from verl_fuse.timeline.files import record_step


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


def test_a_page_that_was_not_written_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record_step(tmp_path, synthetic_timeline(), html=False)
    assert "Page: none was written (fuse.observe.html=false" in trace(capsys, tmp_path)


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    timeline = synthetic_timeline()
    record_step(tmp_path, type(timeline)("[red]run[/]", 1, timeline.start, timeline.end, timeline.spans))
    assert "[red]run[/]: step 1" in trace(capsys, tmp_path)


BAD = {
    "missing": (("nowhere",), "no such directory; needs the directory of a run"),
    "unknown step": (("--step", "9"), "step 9 is not recorded; there is 2 steps from 1 to 2"),
    "step and all": (("--step", "1", "--all"), "--step 1 and --all exclude each other"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_end_in_one_message(run_dir: Path, capsys: pytest.CaptureFixture[str], arguments, message: str):
    where = run_dir / "nowhere" if arguments == ("nowhere",) else run_dir
    shown = trace(capsys, where, *(a for a in arguments if a != "nowhere"), code=2)
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"format": 9}'])
def test_a_corrupt_step_ends_in_one_message(run_dir: Path, capsys: pytest.CaptureFixture[str], content: str):
    (run_dir / "timeline/step_000002.json").write_text(content)
    assert "step_000002.json" in trace(capsys, run_dir, code=2)
