"""Predicts for `verl-fuse tune` what changes save, by a profile of the machine and the base's own trial.

Invariants (tests/unit/simulate/test_foreseen.py):
- where nothing can be predicted, that is said once with the reason, and the search goes on without;
- nothing is predicted of overrides that differ in any other setting than those of micro-batches, activations and
  requests.
"""

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import yaml

from verl_fuse.cli import child
from verl_fuse.cli.advised_settings import model_of
from verl_fuse.cli.profile import cost_of, read_run
from verl_fuse.cli.run import say
from verl_fuse.cli.trials import error_of
from verl_fuse.cli.tuned import Base
from verl_fuse.cost.model import CostModel
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import MODEL, ROLLOUT, getter
from verl_fuse.tune.predicted import KEYS, RecordedWork, effect
from verl_fuse.tune.table import setting_of
from verl_fuse.tune.trial import Overrides

# Seconds that a profile may take, and its grid: sizes of micro-batches and of a packed one.
LIMIT = 300.0
_GRID = ("--batches", "1,4,16", "--lengths", "16,64,256,1024")

# Returns how many seconds a step the second overrides save against the first; None where it is not known.
Saves = Callable[[Overrides, Overrides], float | None]


def predictor(base: Base, folder: Path, trial: Path) -> Saves:
    """Return what predicts savings on the run of a base's own trial, with a profile that is left in a folder."""
    try:
        run, cost = _measured(base, folder, trial)
    except FuseError as error:
        say(f"nothing is predicted of trials: {error}")
        return lambda one, other: None

    @cache
    def saved(overrides: Overrides) -> float | None:
        changes = {key_of(each): yaml.safe_load(each.partition("=")[2]) for each in overrides}
        known = {key: value for key, value in changes.items() if key in KEYS}
        found = effect(run, known, cost) if known else None
        return found.seconds if found else None if known else 0.0

    def saves(one: Overrides, other: Overrides) -> float | None:
        if not {_setting(key_of(each)) for each in {*one} ^ {*other}} <= KEYS:
            return None
        before, after = saved(one), saved(other)
        return None if before is None or after is None else after - before

    return saves


def _setting(key: str) -> str:
    """Return the key of the setting that sets a key, or the key itself."""
    setting = setting_of(key)
    return key if setting is None else setting.key


def _measured(base: Base, folder: Path, trial: Path) -> tuple[RecordedWork, CostModel]:
    """Return the run of a trial and the costs of the machine; a FuseError tells why there are none."""
    config, run = base.compose(()), read_run(trial)
    get, out, log = getter(config), folder / "profile.json", folder / "profile.log"
    model = model_of(config, ROLLOUT)
    options = {
        "--model": get(f"{MODEL}.path"),
        "--device": get("trainer.device"),
        "--precision": get(f"{ROLLOUT}.dtype"),
        "--tp": get(f"{ROLLOUT}.tensor_model_parallel_size"),
        "--from": trial,
        "--out": out,
    }
    command = [sys.executable, "-P", "-m", "verl_fuse", "profile", *_GRID]
    command += [str(each) for option in options.items() for each in option]
    with log.open("wb") as output:
        ending = child.run(command, os.environ, output, limit=LIMIT)
    if ending.stopped_by is not None:
        raise KeyboardInterrupt
    if ending.code or ending.late:
        raise FuseError(f"the profile of {model.name} ended with exit code {ending.code}: {error_of(log)} (log: {log})")
    stages = {name for step in run.steps for name in step.stages}
    seconds = {name: fmean(step.stages[name] for step in run.steps if name in step.stages) for name in stages}
    return RecordedWork(config, seconds, run.steps, cache(partial(model_of, config))), cost_of(
        ProfileTable.read(out), [run]
    )
