"""Tells where verl keeps the checkpoint of a step (trainer_base.py `_save_checkpoint`, `_load_checkpoint`), for
features that keep files beside it. Imports neither verl nor ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_fuse.spec.composed import getter

# verl writes the step of the newest checkpoint into this file (checkpoint_manager.py).
NEWEST_FILE = "latest_checkpointed_iteration.txt"


def saved_at(config: DictConfig, step: int) -> Path:
    """Return the folder that the checkpoint of `step` is written to."""
    return Path(config.trainer.default_local_dir).absolute() / f"global_step_{step}"


def resumed_from(config: DictConfig, step: int) -> Path | None:
    """Return the folder that a run that begins after `step` goes on from; None for a run from the start."""
    if not step:
        return None
    if config.trainer.resume_mode == "resume_path":
        return Path(config.trainer.resume_from_path).absolute()
    return saved_at(config, step)


def to_resume(config: Mapping[str, Any]) -> Path | None:
    """Return the folder that a run which is about to start goes on from; None for a run from the start. verl decides
    that once its workers are up (`_load_checkpoint`)."""
    get = getter(config)
    folder, mode = get("trainer.default_local_dir"), get("trainer.resume_mode")
    if mode == "resume_path":
        return Path(get("trainer.resume_from_path")).absolute()
    newest = Path(folder or "").absolute() / NEWEST_FILE
    if mode != "auto" or not newest.is_file():
        return None
    found = newest.parent / f"global_step_{int(newest.read_text())}"
    return found if found.exists() else None
