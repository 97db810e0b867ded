"""Makes the trials of `verl-fuse tune`: short runs of a recipe in observe mode, and what became of each.

Invariants (tests/unit/cli/test_trials.py):
- a trial saves and validates nothing, and resumes nothing but a checkpoint that is named, in a folder of its own;
- every ending but a signal to stop is an outcome; a failure has a reason;
- the task is made before the first trial, and is in no trial's seconds;
- rollouts are recorded by trials that were asked to, in place of earlier ones, and replayed only where all steps are
  there; what recording took is in no trial's seconds;
- a trial that was to replay and generated is refused;
- a folder of trials holds one search's trials;
- no process of a trial is alive afterwards.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from verl_fuse.cli import child, earlier
from verl_fuse.cli.composition import as_text
from verl_fuse.cli.crash import cause
from verl_fuse.cli.report import read_metrics
from verl_fuse.cli.run import HOME_VARIABLE, PlannedRun, prepare, train
from verl_fuse.cli.screen import last_lines, split
from verl_fuse.cli.tuned import Base
from verl_fuse.compare.run import RunMetrics
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import ROLLOUT, getter
from verl_fuse.tune.search import Request
from verl_fuse.tune.trial import Kind, Outcome

# Steps at the start of each trial that are not counted.
WARM_UP = 1
# Observe mode alone: stock verl looks at its rollout every 2 s, which hides differences of short steps. Profiles and
# traces take time of steps, and would be written over those of the user's run.
TRIAL = (
    "fuse.preset=observe",
    "trainer.v1.trainer_mode=fuse",
    "trainer.resume_mode=disable",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    # Until its warm-up is over an actor is not updated.
    "trainer.critic_warmup=0",
    "trainer.rollout_data_dir=null",
    "trainer.logger=[file]",
    f"{ROLLOUT}.trace.backend=null",
    "global_profiler.steps=null",
    "ray_kwargs.timeline_json_file=null",
)
# CUDA and Ray, vLLM, the host.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|node running low on memory|No available memory for the cache blocks|"
    r"can't allocate memory|^MemoryError",
    re.IGNORECASE,
)
# What the kernel's killer leaves: 128 + SIGKILL.
_KILLED = 137
# Room for logs, metrics and timelines of all trials, and for what is recorded of a token: its ids, masks, positions and
# log-probs, of 8 bytes each at most.
LOGS_BYTES, TOKEN_BYTES = 256 * 2**20, 64
# A reason is cut after so many characters.
_LONGEST = 300
ELSEWHERE = f"${HOME_VARIABLE} names another folder"


def folder_of(base: Base, home: Path) -> Path:
    """Return the folder of all trials of a base."""
    return home / f"{base.name}-tune"


def planned(base: Base, home: Path, number: int, asked: Request) -> PlannedRun:
    """Plan trial `number`; a FuseError lists what is wrong with its overrides."""
    folder, steps = folder_of(base, home), base.first_steps(WARM_UP + asked.steps)
    # No rollout is recorded whose groups are filtered and sampled anew; of a replay's steps the later ones repeat the
    # last.
    records = asked.records and not OmegaConf.select(base.compose(()), "algorithm.filter_groups.enable")
    rollouts = (
        f"skip.rollout_tq.enable={written(asked.replayed or records)}",
        f"skip.rollout_tq.steps=[{','.join(map(str, steps))}]",
        f"skip.rollout_tq.action={'repeat' if asked.replayed else 'cache'}",
        f"skip.rollout_tq.dump_dir={as_text(folder / 'rollouts')}",
    )
    own = (
        f"trainer.total_training_steps={steps[-1]}",
        # An epoch has a step at least, and the base may end before.
        f"trainer.total_epochs={steps[-1] + 1}",
        # verl files recorded rollouts by it: one name for all trials.
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={as_text(folder / f'trial-{number:02d}')}",
    )
    # verl can delete what it has read.
    resumed = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={as_text(base.checkpoint)}",
        "trainer.del_local_ckpt_after_load=false",
    )
    return base.plan([*asked.overrides, *TRIAL, *(resumed if base.checkpoint else ()), *own, *rollouts], home)


def check_disk(base: Base, home: Path, steps: int) -> None:
    """Raise a FuseError unless the disk of the home has room for the logs of trials and for recorded rollouts."""
    get = getter(base.compose(()))
    rows = (get("data.train_batch_size") or 0) * (get(f"{ROLLOUT}.n") or 0)
    tokens = rows * ((get("data.max_prompt_length") or 0) + (get("data.max_response_length") or 0))
    needed = LOGS_BYTES + (WARM_UP + steps) * tokens * TOKEN_BYTES
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        wants = f"trials need {needed / 2**20:.0f} for their logs and recorded rollouts"
        raise FuseError(f"{there}: {free / 2**20:.0f} MiB are free, {wants}; {ELSEWHERE}")


def has_recorded(base: Base, home: Path, steps: int) -> bool:
    """Tell whether the rollouts of a trial with so many steps after warm-up are recorded, and no others."""
    return {int(folder.name) for folder in _recorded(base, home)} == {*base.first_steps(WARM_UP + steps)}


def forget_rollouts(base: Base, home: Path) -> None:
    """Remove recorded rollouts: a trial that is to record would replay them."""
    if (folder := _rollouts(base, home)).exists():
        shutil.rmtree(folder)


def forget_trials(base: Base, home: Path) -> None:
    """Remove the folders of an earlier search's trials: their timelines and logs would be read as this one's."""
    for folder in folder_of(base, home).glob("trial-[0-9][0-9]*"):
        shutil.rmtree(folder)


def _rollouts(base: Base, home: Path) -> Path:
    return folder_of(base, home) / "rollouts"


def _recorded(base: Base, home: Path) -> set[Path]:
    """Return the folders of the steps whose rollouts are recorded: verl writes STEP/0/meta.json last, below folders
    named after the experiment and the project, whose names may have folders of their own."""
    return {file.parent.parent for file in _rollouts(base, home).rglob("0/meta.json")}


def spent_recording(base: Base, home: Path, steps: int) -> list[float]:
    """Return the seconds that the rollouts of a trial's counted steps took to record: verl makes `0` in the step's
    folder, reads the batch into it, and writes meta.json last. Nothing else of the step goes on meanwhile."""
    spent = {
        int(folder.name): (folder / "0" / "meta.json").stat().st_mtime - folder.stat().st_mtime
        for folder in _recorded(base, home)
    }
    return [spent.get(step, 0.0) for step in base.first_steps(WARM_UP + steps)[WARM_UP:]]


def make_task(launch: PlannedRun) -> None:
    """Make the recipe's task, if it is not there yet, so that it is in no trial's seconds; a FuseError tells why it was
    not made, KeyboardInterrupt that it was told to stop."""
    _make_folder(launch)
    path = launch.run_dir.parent / "task.log"
    with path.open("wb") as log:
        ending = prepare(launch, log)
    if ending.stopped_by is not None:
        raise KeyboardInterrupt
    if ending.code:
        why = error_of(path) or "its log is empty"
        raise FuseError(f"making the task ended with exit code {ending.code}: {why} (log: {path})")


def made(base: Base, home: Path, number: int, asked: Request) -> Outcome:
    """Plan and make a trial, whose task is there; KeyboardInterrupt where it was told to stop."""
    try:
        if asked.records:
            # verl would replay them.
            forget_rollouts(base, home)
            check_disk(base, home, asked.steps)
        recorded = _recorded(base, home)
        found = outcome(replace(planned(base, home, number, asked), prepare=None), asked.limit)
    except FuseError as error:
        return Outcome("refused", reason=str(error))
    except OSError as error:
        # Of its folder or log: a full disk is one.
        return Outcome("crashed", reason=f"{error.filename}: {error.strerror}")
    # Where verl finds no recorded rollout it generates, and records that: nothing must replay it.
    if asked.replayed and _recorded(base, home) != recorded:
        shutil.rmtree(_rollouts(base, home), ignore_errors=True)
        return Outcome(
            "refused", reason=f"{_rollouts(base, home)}: verl found no recorded rollout there, and generated"
        )
    if asked.records and found.kind == "measured":
        # Other live trials record nothing.
        spent = spent_recording(base, home, asked.steps)
        return replace(found, seconds=tuple(each - less for each, less in zip(found.seconds, spent, strict=False)))
    return found


def _make_folder(launch: PlannedRun) -> None:
    """Make the folder of a trial; a FuseError if that cannot be."""
    try:
        launch.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FuseError(f"trainer.default_local_dir={launch.run_dir} cannot be made: {error.strerror}") from error


def outcome(launch: PlannedRun, limit: float) -> Outcome:
    """Make a trial; all that it prints is in its log. A FuseError tells what is wrong with its folder or data."""
    _make_folder(launch)
    earlier.move_away(launch.log)
    with launch.log.open("wb") as log:
        ending, logged = prepare(launch, log), False
        if not ending.code and ending.stopped_by is None:
            ending, logged = train(launch, log, limit=limit)
    if ending.stopped_by is not None:
        raise KeyboardInterrupt
    return judged(ending, launch.log, launch.metrics if logged else None, limit)


def judged(ending: child.Ending, log: Path, metrics: Path | None, limit: float) -> Outcome:
    """Say what became of a trial, by its ending, its log and its metrics (None: there are none)."""
    if ending.late:
        return Outcome("hung", reason=f"not done after {limit:.0f} s; {error_of(log) or 'its log is empty'}")
    if ending.code:
        found = next((line for line in _lines(log) if _OUT_OF_MEMORY.search(line)), None)
        kind: Kind = "out_of_memory" if found or ending.code == _KILLED else "crashed"
        return Outcome(kind, reason=(found or error_of(log) or f"exit code {ending.code}")[:_LONGEST])
    run = RunMetrics.of(str(log.parent), read_metrics(metrics) if metrics else ())
    if not (counted := run.timed[WARM_UP:]):
        return Outcome(
            "crashed", reason=f"ended after {len(run.timed)} steps: needs more than the {WARM_UP} of warm-up"
        )
    mean, most = (run.metric(f"response_length/{fact}") for fact in ("mean", "max"))
    lengths = tuple((mean.get(step, 0.0), most.get(step, 0.0)) for step in counted)
    known = all(map(all, lengths))
    return Outcome("measured", tuple(map(run.seconds, counted)), None, run.peak_bytes, lengths if known else ())


def error_of(log: Path) -> str | None:
    """Return the last error of a log, or its last line; None if it is empty."""
    return (cause(log) or next(reversed([*_lines(log)]), "")).partition("\n")[0] or None


def _lines(log: Path) -> Iterator[str]:
    yield from (split(line)[1].strip() for line in last_lines(log, most=2000, size=1 << 20))
