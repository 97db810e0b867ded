"""`verl-fuse compare BASE FUSED`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import step_records, write_run
from omegaconf import OmegaConf

from verl_fuse.cli.compare import judge
from verl_fuse.cli.main import main
from verl_fuse.spec.run_config import save_config


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return write_run(tmp_path / "stock", step_records(1))


@pytest.fixture
def faster(tmp_path: Path) -> Path:
    return write_run(tmp_path / "faster", step_records(1, fused=True, seconds=4.0))


@pytest.fixture
def equal(tmp_path: Path) -> Path:
    return write_run(tmp_path / "equal", step_records(2, fused=True))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code or 0) == code, captured.err
    return captured.err if code == 2 else captured.out


def test_a_run_that_is_a_fifth_faster(stock: Path, faster: Path, capsys: pytest.CaptureFixture[str]):
    shown = ask(capsys, stock, faster)
    assert (
        shown.splitlines()[-1]
        == "Verdict: fused steps are 1.24 times as fast as stock's [1.20, 1.28]; rewards within noise"
    )
    for text in (
        f"base:  {stock}",
        f"fused: {faster}",
        "times of 19 steps compared, 2 to 20",
        "update_actor",
        "20,000",
        "1,280",
    ):
        assert text in shown
    for curve in (
        "reward (critic/score/mean)",
        "KL to the old policy (actor/ppo_kl)",
        "response tokens (response_length/mean)",
    ):
        assert curve in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_page_links_the_timelines_that_there_are(
    stock: Path, faster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (faster / "timeline.html").touch()
    (tmp_path / "pages").mkdir()
    ask(capsys, stock, faster, "--html", tmp_path / "pages/page.html")
    assert (tmp_path / "pages/page.html").read_text().count("timeline.html") == 1
    assert 'href="../faster/timeline.html"' in (tmp_path / "pages/page.html").read_text()


def test_of_an_equal_run_is_said_that_nothing_differs(stock: Path, equal: Path, capsys: pytest.CaptureFixture[str]):
    assert "Verdict: nothing differs beyond noise: fused steps are " in ask(capsys, stock, equal)


def test_a_third_run_in_observe_mode_tells_what_is_polling(tmp_path: Path, stock: Path, faster: Path, capsys):
    observe = write_run(tmp_path / "observe", step_records(3, fused=True, seconds=4.5))
    assert judge(stock, faster, 1, True, None, None, observe) == 0
    found = json.loads(capsys.readouterr().out)
    arms = {name: interval["value"] for name, interval in found["arms"].items()}
    assert list(arms) == ["stock", "observe", "fused"]
    assert arms["stock"] == found["base"]["seconds"]["value"]
    assert arms["fused"] == found["fused"]["seconds"]["value"]
    polling = found["polling"]
    assert polling["value"] == pytest.approx(arms["stock"] - arms["observe"])
    assert polling["low"] < polling["value"] < polling["high"]
    beside = [note for note in found["notes"] if note.startswith("Beside observe mode fused steps are 1.1")]
    assert len(beside) == 1, found["notes"]
    assert judge(stock, faster, 1, True, None, None) == 0
    assert not {"arms", "polling"} & json.loads(capsys.readouterr().out).keys()


@pytest.mark.parametrize(
    ("wanted", "run", "code"), [("1.1", "faster", 0), ("1.3", "faster", 1), ("1.1", "equal", 1), ("0.8", "equal", 0)]
)
def test_the_exit_code_says_whether_it_is_fast_enough(
    wanted: str, run: str, code: int, stock: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
):
    shown = ask(capsys, stock, request.getfixturevalue(run), "--at-least", wanted, code=code)
    met = "not met" if code else "met"
    assert f"--at-least {wanted}: {met}: the lower end of the 95 % interval of the speed-up is" in shown


def test_json_is_one_object_and_nothing_else(stock: Path, faster: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(ask(capsys, stock, faster, "--json", "--at-least", "2", code=1))
    assert found["verdict"] == "fused steps are 1.24 times as fast as stock's [1.20, 1.28]; rewards within noise"
    assert found["at_least"] == {"wanted": 2.0, "bound": "speedup.low", "met": False}
    assert found["speedup"]["low"] == pytest.approx(1 / found["ratio"]["high"])
    assert sum(stage["base"] for stage in found["stages"]) == pytest.approx(found["whole"]["base"])
    assert found["curves"][0]["base"]["1"] == pytest.approx(step_records(1)[0]["data"]["critic/score/mean"])


def test_the_page_is_written_where_it_is_wanted(
    stock: Path, faster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shown = ask(capsys, stock, faster, "--html", tmp_path / "page.html")
    assert f"Page: {tmp_path / 'page.html'}" in shown
    assert "Fused steps are 1.24 times as fast as stock" in (tmp_path / "page.html").read_text()


def test_samples_asked_for_and_other_differences_come_from_the_configurations(
    stock: Path, faster: Path, capsys: pytest.CaptureFixture[str]
):
    config = OmegaConf.create(
        {"data": {"train_batch_size": 16}, "actor_rollout_ref": {"rollout": {"n": 4}}, "fuse": {"plan": None}}
    )
    save_config(stock, config)
    save_config(faster, OmegaConf.merge(config, {"data": {"train_batch_size": 8}, "fuse": {"plan": "plan.json"}}))
    shown = " ".join(ask(capsys, stock, faster).split())
    assert "1,280 asked for" in shown
    assert "Note: The runs differ in more than verl-fuse: data.train_batch_size=16 and 8." in shown
    pages = [run / "timeline.html" for run in (stock, faster)]
    for page in pages:
        page.touch()
    assert "data.train_batch_size=16 and 8." in " ".join(ask(capsys, *pages).split())


def test_a_terminal_that_lacks_characters_shows_others(stock: Path, faster: Path):
    command = [sys.executable, "-m", "verl_fuse", "compare", str(stock), str(faster)]
    shown = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"fused steps are 1.24 times as fast" in shown.stdout


def test_a_page_of_the_run_names_the_run(stock: Path, faster: Path, capsys: pytest.CaptureFixture[str]):
    (faster / "timeline.html").touch()
    assert f"fused: {faster}\n" in ask(capsys, stock, faster / "timeline.html")
    shown = ask(capsys, stock, faster / "metrics.jsonl", code=2)
    assert "metrics.jsonl: needs the directory of a run" in shown


BAD = {
    "missing": ("nowhere", None, "nowhere: no such directory; needs the directory of a run"),
    "empty": ("empty", "", "steps with a time (timing_s/step): 0; needs more than the 1 that --warm-up leaves out"),
    "torn": ("torn", '{"step": 1, "da', "metrics.jsonl, line 1: not a metrics record"),
    "not text": ("binary", "\x00", "not a metrics record"),
    "no step": ("endless", '{"step": 1e999, "data": {}}', "metrics.jsonl, line 1: not a metrics record"),
    "nested": ("nested", "[" * 100_000, "metrics.jsonl, line 1: not a metrics record"),
    "a list": ("list", "[1, 2]", 'line 1: not a metrics record, {"step": 1, "data": {...}}: \'[1, 2]\''),
    "too long": (
        "long",
        f'{{"step": 1, "data": {{"timing_s/step": 1{"0" * 400}}}}}',
        "steps with a time (timing_s/step): 0;",
    ),
    "other": ("other", None, "no metrics.jsonl; it is written by `verl-fuse run`"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("first", [True, False])
def test_a_bad_folder_is_refused_in_one_line(
    stock: Path,
    tmp_path: Path,
    name: str,
    content: str | None,
    message: str,
    first: bool,
    capsys: pytest.CaptureFixture[str],
):
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content)
    shown = ask(capsys, *((folder, stock) if first else (stock, folder)), code=2)
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_page_that_cannot_be_written_is_refused_in_one_line(
    stock: Path, faster: Path, capsys: pytest.CaptureFixture[str]
):
    shown = ask(capsys, stock, faster, "--html", stock / "none" / "page.html", code=2)
    assert "page.html: cannot be written" in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_speed_up_that_is_no_number_is_refused(stock: Path, capsys: pytest.CaptureFixture[str]):
    assert "--at-least inf: needs a finite number, such as 1.1" in ask(
        capsys, stock, stock, "--at-least", "inf", code=2
    )
    assert "--at-least" in ask(capsys, stock, stock, "--at-least", "nan", code=2)


def test_metrics_that_are_no_text_are_refused(stock: Path, capsys: pytest.CaptureFixture[str]):
    (stock / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "metrics.jsonl: cannot be read" in ask(capsys, stock, stock, code=2)
