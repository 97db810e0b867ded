"""Tells where verl keeps the checkpoint of a step (trainer_base.py `_save_checkpoint`, `_load_checkpoint`), for
features that keep files beside it."""

from pathlib import Path

from omegaconf import DictConfig


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
