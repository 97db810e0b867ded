"""Checks the checkpoint that a run goes on from, which verl looks for once its workers are up
(`PPOTrainer._load_checkpoint`), and finds runs that have no step left, or none at all.

Invariants (tests/unit/host/test_resumption.py):
- a checkpoint is refused where verl ends in an error; a driver that joins a Ray cluster may not see the disks of
  the trainer, so nothing is concluded from its own;
- a run has nothing left where verl's loop would not begin (`PPOTrainer.fit`): a run that only validates has;
- a number of steps or epochs with which that loop begins in no run is refused.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_fuse.errors import FuseError
from verl_fuse.host.start.data_rows import rows_at_most
from verl_fuse.host.upstream.checkpoints import NEWEST_FILE, STEP_FOLDER, step_of, to_resume
from verl_fuse.spec.composed import Get, getter, is_legacy, is_validation_only
from verl_fuse.spec.files import load
from verl_fuse.spec.step import Refusal

_MODE, _FROM = "trainer.resume_mode", "trainer.resume_from_path"
_STEPS, _EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
_MODES = ("auto", "disable", "resume_path")


def resume_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a checkpoint that verl cannot find."""
    get = getter(config)
    trainer = get("trainer")
    if is_legacy(config) or not isinstance(trainer, DictConfig) or "resume_mode" not in trainer:
        return
    mode, path = get(_MODE), get(_FROM)
    if mode not in _MODES:
        yield Refusal(_MODE, mode, f"needs one of {', '.join(_MODES)}")
    elif mode == "auto" and not named_cluster(get):
        newest = Path(str(get("trainer.default_local_dir"))).absolute() / NEWEST_FILE
        try:
            load(newest, int)
        except FuseError as error:
            if newest.is_file():
                yield Refusal(_MODE, mode, f"{error}: needs disable, or resume_path and {_FROM}")
    elif mode == "resume_path":
        name = f".../{STEP_FOLDER}N, N the number of its step"
        if not isinstance(path, str) or step_of(path) is None:
            yield Refusal(_FROM, path, f"{_MODE}=resume_path needs the folder of a checkpoint, {name}")
        elif not Path(path).absolute().is_dir() and not named_cluster(get):
            there = ", ".join(sorted(found.name for found in Path(path).absolute().parent.glob(f"{STEP_FOLDER}*")))
            allowed = f"there is no such folder; beside it: {there or 'no checkpoint'}. Needs {name}"
            yield Refusal(_FROM, path, f"{allowed}, or {_MODE}=disable")


def step_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a run that trains no step, and validates nothing before it."""
    get = getter(config)
    if is_legacy(config) or get("trainer.val_only") or get("trainer.val_before_train") is not False:
        return
    instead = "trainer.val_only=true validates alone"
    steps, epochs = get(_STEPS), get(_EPOCHS)
    if isinstance(steps, int | float) and steps < 1:
        yield Refusal(_STEPS, steps, f"trains no step: needs >= 1, or null for all of {_EPOCHS}; {instead}")
    if isinstance(epochs, int | float) and epochs <= 0:
        yield Refusal(_EPOCHS, epochs, f"trains no step: needs > 0; {instead}")


def nothing_left(config: DictConfig) -> str | None:
    """Return a sentence on a run whose checkpoint has all steps that are asked for; None for any other run, or where
    this is not known."""
    get = getter(config)
    if is_legacy(config) or is_validation_only(get) or named_cluster(get):
        return None
    folder = to_resume(config)
    step = step_of(str(folder)) if folder else None
    reached = [f"{key}={get(key)}{note}" for key, note, steps in _limits(get) if step is not None and step >= steps]
    if not reached:
        return None
    return (
        f"nothing is left to do: {folder} is the checkpoint of step {step}, and the run ends with "
        f"{' and '.join(reached)}. Larger values go on from there, {_MODE}=disable starts anew, and "
        "trainer.val_only=true validates"
    )


def _limits(get: Get) -> Iterator[tuple[str, str, float]]:
    """Yield (key, a note on it, the number of steps after which it ends the run) of the limits that are known."""
    steps, epochs = get(_STEPS), get(_EPOCHS)
    if isinstance(steps, int | float):
        yield _STEPS, "", steps
    rows, batch = rows_at_most(get), get("data.train_batch_size")
    if rows is not None and isinstance(batch, int) and batch >= 1 and isinstance(epochs, int | float):
        each = rows // batch
        yield _EPOCHS, f" (of {each} steps)", each * epochs


def named_cluster(get: Get) -> str | None:
    """Return what names the Ray cluster that a run joins, as KEY=VALUE; None for a run that starts a Ray of its own."""
    key, address, variable = "ray_kwargs.ray_init.address", get("ray_kwargs.ray_init.address"), "RAY_ADDRESS"
    if address in (None, "", "auto") and os.environ.get(variable):
        key, address = variable, os.environ[variable]
    return f"{key}={address}" if address and address != "local" else None
