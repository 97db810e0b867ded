"""Tells where verl keeps the checkpoint of a step (trainer_base.py `_save_checkpoint`, `_load_checkpoint`), for
features that keep files beside it. Imports neither verl nor ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import getter
from verl_fuse.spec.files import load

# verl writes the step of the newest checkpoint into this file (checkpoint_manager.py).
NEWEST_FILE = "latest_checkpointed_iteration.txt"
# The name of a checkpoint's folder ends with its step.
STEP_FOLDER = "global_step_"


def saved_at(config: DictConfig, step: int) -> Path:
    """Return the folder that the checkpoint of `step` is written to."""
    return Path(config.trainer.default_local_dir).absolute() / f"{STEP_FOLDER}{step}"


def step_of(folder: str) -> int | None:
    """Return the step of the checkpoint in `folder` as verl reads it from the path; None where it cannot."""
    _, mark, step = folder.rpartition(STEP_FOLDER)
    try:
        return int(step) if mark else None
    except ValueError:
        return None


def resumed_from(config: DictConfig, step: int) -> Path | None:
    """Return the folder that a run that begins after `step` goes on from; None for a run from the start."""
    if not step:
        return None
    if config.trainer.resume_mode == "resume_path":
        return Path(config.trainer.resume_from_path).absolute()
    return saved_at(config, step)


def newest_in(folder: Path) -> Path | None:
    """Return the checkpoint that verl goes on from in the folder of a run; None where there is none, or the file that
    names it is damaged."""
    try:
        found = folder / f"{STEP_FOLDER}{load(folder / NEWEST_FILE, int)}"
    except FuseError:
        return None
    return found if found.exists() else None


def to_resume(config: Mapping[str, Any]) -> Path | None:
    """Return the folder that a run which is about to start goes on from; None for a run from the start. verl decides
    that once its workers are up (`_load_checkpoint`)."""
    get = getter(config)
    mode = get("trainer.resume_mode")
    if mode == "resume_path":
        return Path(path).absolute() if isinstance(path := get("trainer.resume_from_path"), str) else None
    return newest_in(Path(get("trainer.default_local_dir") or "").absolute()) if mode == "auto" else None
