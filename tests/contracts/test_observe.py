"""The built-in plugin `observe`, driven through its hooks in the trainer's way."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block
from verl_fuse.spec.events import Event, Generated, Polled, SetUp, StageBegun, StepBegun, StepEnded, TrainingEnded
from verl_fuse.spec.step import RolloutView, Sample
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.testing import SetUpTrainer
from verl_fuse_observe import plugin
from verl_fuse_observe.config import ObserveConfig
from verl_fuse_observe.writer import StepWriter

README = Path(plugin.__file__).with_name("README.md")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hooks with `observe` as the only plugin."""
    monkeypatch.setattr(plugins, "BUILTIN", {"observe": plugins.BUILTIN["observe"]})
    return plugins.load().hook


Emit = Callable[..., None]


@pytest.fixture
def start(hook: Any, tmp_path: Path) -> Callable[..., Emit]:
    """Set up a run of 8 groups of 4 samples per step with these options; returns what sends its events."""

    def begin(run_dir: Path = tmp_path, total_steps: int = 40, **options: Any) -> Emit:
        config = read_block(ObserveConfig, options, "fuse.observe")
        hook.fuse_setup(trainer=SetUpTrainer(blocks={"observe": config}))

        def emit(kind: type[Event], step: int = 0, time: float = 0.0, **fields: Any) -> None:
            hook.fuse_event(event=kind(step, time, **fields))

        emit(SetUp, run_dir=run_dir, resumed_from=None, total_steps=total_steps, expected=32, groups=8)
        return emit

    return begin


def timeline(step: int = 1, start: float = 0.0, end: float = 14.0) -> Timeline:
    """Two devices: replica 0 works 6 s, replica 1 2 s; rank 0 and rank 1 4 s each; 14 s in all."""
    requests = [("replica 0", 0, 2), ("replica 0", 0, 2), ("replica 0", 1, 6), ("replica 1", 0, 1), ("replica 1", 1, 2)]
    spans = [Span(f"r{i}", track, "generate", start + s, start + e) for i, (track, s, e) in enumerate(requests)]
    spans += [Span("update_actor", f"rank {rank}", "train", start + 8, start + 12) for rank in range(2)]
    spans.append(Span("gen", "step", "stage", start, start + 6))
    return Timeline("run", step, start, end, tuple(spans))


def view(groups_finished: int, finished: int, ready: int) -> RolloutView:
    # The first of them has two trajectories.
    samples = tuple(Sample(f"g_{key}", "g", 10, 20) for key in ["0_1", *(f"{i}_0" for i in range(ready))])
    return RolloutView(3, 12.0, 32, finished, 8, groups_finished, samples, ())


def test_the_config_block_has_the_documented_defaults():
    documented = re.findall(r"^  (\w+): (\S+)$", README.read_text(), re.MULTILINE)
    defaults = {name: str(value).lower() for name, value in vars(ObserveConfig()).items()}
    assert dict(documented) == defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_steps": 0}, r"fuse\.observe\.keep_steps=0: needs >= 1"),
        ({"html": "yes"}, r"fuse\.observe\.html='yes': needs true or false"),
        ({"progress_interval": 0}, r"fuse\.observe\.progress_interval=0\.0: needs >= 0\.1"),
        ({"perfeto": True}, r"fuse\.observe\.perfeto: unknown key \(did you mean 'perfetto'\?\)"),
    ],
)
def test_a_bad_block_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(FuseError, match=message):
        read_block(ObserveConfig, options, "fuse.observe")


def test_metrics_are_what_the_readme_says(hook: Any, start: Callable[..., Emit]):
    start()
    (metrics,) = hook.fuse_metrics(timeline=timeline())
    assert metrics == {
        "fuse/step_seconds": 14.0,
        "fuse/generation_seconds": 6.0,
        "fuse/long_tail_fraction": pytest.approx(4 / 6),
        "fuse/requests": 5.0,
        "fuse/idle_fraction/replica": pytest.approx(1 - 8 / 28),
        "fuse/idle_fraction/rank": pytest.approx(1 - 8 / 28),
        "fuse/idle_fraction/device": pytest.approx(1 - 16 / 28),
        "fuse/timeline_write_failures": 0.0,
    }
    assert sorted(metrics) == sorted(re.findall(r"^\| `(fuse/\S+)`", README.read_text(), re.MULTILINE))


def test_what_cannot_be_measured_is_left_out(hook: Any):
    (metrics,) = hook.fuse_metrics(timeline=Timeline("run", 1, 0.0, 2.0, ()))
    assert metrics == {"fuse/step_seconds": 2.0, "fuse/requests": 0.0}


def test_a_step_leaves_its_files_and_the_end_names_the_page(
    start: Callable[..., Emit], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    emit = start()
    emit(StepBegun, 1)
    emit(StepEnded, 1, 14.0, timeline=timeline(), samples=32, lengths={}, metrics={})
    emit(TrainingEnded, 1, 14.0)
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == [
        "step_000001.html",
        "step_000001.json",
        "step_000001.perfetto.json",
        "steps.json",
    ]
    assert f"verl-fuse: timeline of every step: {tmp_path}/timeline.html" in capsys.readouterr().out


def test_a_run_without_pages_names_none(start: Callable[..., Emit], capsys: pytest.CaptureFixture[str]):
    emit = start(html=False)
    emit(StepBegun, 1)
    emit(StepEnded, 1, 14.0, timeline=timeline(), samples=32, lengths={}, metrics={})
    emit(TrainingEnded, 1, 14.0)
    assert "timeline.html" not in capsys.readouterr().out


def test_progress_reads_like_the_readme(start: Callable[..., Emit], capsys: pytest.CaptureFixture[str]):
    emit = start()
    # Four groups lost some of their samples, and one all.
    left = {f"g{group}": [20] * samples for group, samples in enumerate((4, 4, 4, 1, 1, 2, 2))}
    for step in (1, 2):
        emit(StepBegun, step, 14.0 * (step - 1))
        if step == 2:
            emit(Generated, 2, 20.0, responses=left, discarded={}, prompts={}, missing=14)
            emit(StageBegun, 2, 26.0, name="update_actor")
        emit(
            StepEnded,
            step,
            14.0 * step,
            timeline=timeline(step, 14.0 * (step - 1), 14.0 * step),
            samples=32,
            lengths={},
            metrics={},
        )
    emit(StepBegun, 3, 28.0)
    emit(Polled, 3, 40.0, view=view(groups_finished=5, finished=22, ready=4))
    emit(StageBegun, 3, 51.0, name="update_critic")
    printed = capsys.readouterr().out
    assert "\n".join(printed.splitlines()[2:4]) in README.read_text()
    assert printed.splitlines() == [
        "verl-fuse: step 1/40 done in 14 s: 8/8 groups trained (32 samples), devices idle 43%, ETA 9 min 06 s",
        (
            "verl-fuse: step 2/40 at 12 s, update_actor: 7/8 groups generated, 18/32 samples scored, 0/8 groups "
            "trained, ETA 8 min 54 s"
        ),
        (
            "verl-fuse: step 2/40 done in 14 s: 7/8 groups trained (18 samples, 14 missing), devices idle 43%, "
            "ETA 8 min 52 s"
        ),
        (
            "verl-fuse: step 3/40 at 12 s, generating: 5/8 groups generated, 18/32 samples scored, 0/8 groups trained, "
            "ETA 8 min 40 s"
        ),
        (
            "verl-fuse: step 3/40 at 23 s, update_critic: 8/8 groups generated, 32/32 samples scored, 0/8 groups "
            "trained, ETA 8 min 38 s"
        ),
    ]


def test_a_step_prints_at_most_one_line_per_interval(start: Callable[..., Emit], capsys: pytest.CaptureFixture[str]):
    emit = start(progress_interval=5.0)
    emit(StepBegun, 1, 100.0)
    for tick in range(200):
        emit(Polled, 1, 100.0 + tick * 0.1, view=view(0, 0, 0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "verl-fuse: step 1/40 at 5.0 s",
        "verl-fuse: step 1/40 at 10 s",
        "verl-fuse: step 1/40 at 15 s",
    ]
    assert all(line.endswith("ETA after this step") for line in lines)


def test_one_slow_step_does_not_move_the_eta(start: Callable[..., Emit], capsys: pytest.CaptureFixture[str]):
    emit = start(total_steps=6)
    now = 0.0
    for step, seconds in enumerate((10.0, 10.0, 500.0, 10.0, 10.0, 10.0), start=1):
        emit(StepBegun, step, now)
        emit(
            StepEnded,
            step,
            now + seconds,
            timeline=timeline(step, now, now + seconds),
            samples=32,
            lengths={},
            metrics={},
        )
        now += seconds
    assert [line.rsplit(", ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "ETA 50 s", "ETA 40 s", "ETA 30 s", "ETA 20 s", "ETA 10 s", "last step",
    ]  # fmt: skip


def test_progress_off_prints_nothing(start: Callable[..., Emit], capsys: pytest.CaptureFixture[str]):
    emit = start(progress=False)
    emit(StepBegun, 1)
    emit(StepEnded, 1, 14.0, timeline=timeline(), samples=32, lengths={}, metrics={})
    assert capsys.readouterr().out == ""


def test_disabled_does_nothing(hook: Any, start: Callable[..., Emit], tmp_path: Path):
    emit = start(enabled=False)
    emit(StepEnded, 1, 14.0, timeline=timeline(), samples=32, lengths={}, metrics={})
    assert list(tmp_path.iterdir()) == []
    assert hook.fuse_metrics(timeline=timeline()) == []


def test_options_reach_the_files(start: Callable[..., Emit], tmp_path: Path):
    emit = start(html=False, perfetto=False, keep_steps=1)
    for step in (1, 2):
        emit(StepEnded, step, 14.0, timeline=timeline(step), samples=32, lengths={}, metrics={})
    emit(TrainingEnded, 2)
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == ["step_000002.json", "steps.json"]
    assert not (tmp_path / "timeline.html").exists()


def test_a_run_directory_that_cannot_be_written_is_refused_at_setup(start: Callable[..., Emit], tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FuseError, match=r"fuse\.run_dir='.*/file': timelines cannot be written there"):
        start(run_dir=tmp_path / "file")


def test_a_step_that_cannot_be_written_is_said_and_counted(
    hook: Any, start: Callable[..., Emit], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    emit = start()
    (tmp_path / "timeline/steps.json").unlink()
    (tmp_path / "timeline").rmdir()
    (tmp_path / "timeline").write_text("in the way")
    emit(StepEnded, 1, 14.0, timeline=timeline(), samples=32, lengths={}, metrics={})
    assert hook.fuse_metrics(timeline=timeline())[0]["fuse/timeline_write_failures"] == 1.0
    assert "verl-fuse: timeline of step 1 not written to" in capsys.readouterr().out


def test_the_next_step_does_not_wait_for_the_pages_of_the_last(tmp_path: Path):
    written, may_write = [], threading.Event()

    def record(timeline: Timeline) -> None:
        assert may_write.wait(60)
        written.append(timeline.step)

    writer = StepWriter(tmp_path, record)
    writer.write(timeline(1))
    assert written == []
    may_write.set()
    writer.write(timeline(2))
    assert writer.settle() == 0
    assert written == [1, 2]


def test_events_before_setup_are_a_fault(hook: Any):
    with pytest.raises(FuseError, match="event StepBegun of step 1 came before SetUp"):
        hook.fuse_event(event=StepBegun(1, 0.0))
