"""Keeps the files of earlier runs in a run directory, and joins the metrics of a run that goes on from a checkpoint
with the metrics of the run before.

Invariants (tests/unit/recipes/test_earlier.py):
- nothing of an earlier run is deleted: its file moves to NAME.N.SUFFIX, and moves back if the run made nothing;
- after a run that went on from a checkpoint, the metrics file has every step once: the steps before the checkpoint as
  they were logged then.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_fuse.cli.report import read_records
from verl_fuse.host.upstream.checkpoints import step_of, to_resume


def move_away(file: Path) -> Path | None:
    """Give an earlier run's file another name, and return it; None if there is no such file."""
    if not file.exists():
        return None
    number = 1
    while (kept := _numbered(file, number)).exists():
        number += 1
    file.rename(kept)
    return kept


def put_back(kept: Mapping[Path, Path | None]) -> None:
    """Undo `move_away` of files (its results, by file) for a run that made nothing: what that run wrote of them gives
    way to the earlier files, which belong together."""
    if not any(kept.values()):
        return
    for file, old in kept.items():
        if old is None:
            file.unlink(missing_ok=True)
        else:
            old.replace(file)


def resumed_step(config: DictConfig, run_dir: Path) -> int | None:
    """Return the step of `run_dir` that a run with this configuration goes on after; None for a run that starts anew,
    or from elsewhere."""
    folder = to_resume(config)
    return step_of(str(folder)) if folder and folder.parent == run_dir else None


def join(metrics: Path, resumed: int) -> None:
    """Put the records of steps up to `resumed`, logged by earlier runs, before the records of the run that went on
    after `resumed`.

    A step that both logged is one record: a run that goes on after a step may begin with a validation of that step. A
    FuseError names the line that cannot be read; the files then stay as they are.
    """
    found = _records(metrics)
    number = 1
    while _numbered(metrics, number).exists():
        number += 1
    # The newest comes first: each file has the steps from the start of its run. The first file of all has step 1.
    for earlier in reversed(range(1, number)):
        before = _records(_numbered(metrics, earlier))
        first = min(found, default=resumed + 1)
        for step, data in before.items():
            if step <= min(resumed, first):
                found[step] = data | found.get(step, {})
        if min(before, default=resumed) <= 1:
            break
    written = metrics.with_suffix(".joined")
    written.write_text("".join(json.dumps({"step": step, "data": found[step]}) + "\n" for step in sorted(found)))
    written.replace(metrics)


def _numbered(file: Path, number: int) -> Path:
    return file.with_suffix(f".{number}{file.suffix}")


def _records(file: Path) -> dict[int, dict[str, Any]]:
    """Return the file's record of each step."""
    found: dict[int, dict[str, Any]] = {}
    for step, data in read_records(file):
        found[step] = found.get(step, {}) | data
    return found
