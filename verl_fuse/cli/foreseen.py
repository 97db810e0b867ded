"""Predicts for `verl-fuse tune` what changes save, by a profile of the machine and the trials that were made, from
which the floors of the software are read again after each.

Invariants (tests/unit/simulate/test_foreseen.py):
- where nothing can be predicted, that is said once with the reason, and the search goes on without;
- a trial that changed another setting, or cannot be read, tells nothing of the floors;
- nothing is predicted of overrides that differ in any other setting than those of micro-batches, activations and
  requests.
"""

import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from omegaconf import DictConfig

from verl_fuse.cli import child
from verl_fuse.cli.advised_settings import model_of
from verl_fuse.cli.output import note
from verl_fuse.cli.profile import cost_of, read_run, with_floors
from verl_fuse.cli.report import logged
from verl_fuse.cli.trials import error_of
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, run_of
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import ACTOR, CRITIC, MODEL, ROLLOUT, getter, has_adapters, has_critic, on_accelerators
from verl_fuse.spec.run_config import find_config
from verl_fuse.spec.timeline import GENERATION
from verl_fuse.tune.predicted import FLAGS, KEYS, RecordedWork, effect, model_block, more_at_limits
from verl_fuse.tune.table import setting_of
from verl_fuse.tune.trial import Overrides, Trial

# The grid of the profile: sizes of micro-batches, and of a packed one.
_GRID = ("--batches", "1,4,16", "--lengths", "16,64,256,1024")
_ENGINES = ("fsdp", "fsdp2")
# What reading trials and computing with them may raise.
_FAULTS = (FuseError, OSError, ArithmeticError, LookupError, ValueError, MemoryError)


@dataclass(frozen=True)
class Foreseen:
    """What is predicted of trials: `ratio` returns the share of the seconds a step with the first overrides that a step
    with the second ones takes, replayed or not, and `more_at_limits` the bytes by which a rank's activations grow from
    the base's trial to the longest samples with overrides; None where it is not known. A rank has `memory` bytes."""

    ratio: Callable[[Overrides, Overrides, bool], float | None]
    more_at_limits: Callable[[Overrides], float | None]
    memory: float


NOTHING = Foreseen(lambda one, other, replayed: None, lambda overrides: None, math.inf)


def predictor(
    config: DictConfig, trial: Path, recording: float, limit: float, later: Callable[[], Sequence[tuple[Path, Trial]]]
) -> Foreseen:
    """Return what predicts steps from the base's trial, of which each step took `recording` seconds to record its
    rollout. The profile, which may take `limit` seconds, is left beside the trial. `later` returns the trials that were
    measured after it, with their folders."""
    try:
        run, base, table = _measured(config, trial, recording, limit)
    except (FuseError, OSError) as error:
        note(f"nothing is predicted of trials: {error}")
        return NOTHING
    faults, blocks = list[Exception](), (MODEL, model_block(CRITIC))

    @cache
    def as_run(folder: Path, trial: Trial) -> RecordedRun | None:
        """Return the run of a trial; None where its floors are not those of the base, or cannot be read."""
        if not _settings(trial.overrides) <= KEYS:
            return None
        actor, critic = ([_values(trial.overrides).get(f"{block}.{name}") for name in FLAGS] for block in blocks)
        # `RecordedRun` knows these flags of the actor alone.
        if has_critic(run.get) and actor != critic:
            return None
        try:
            return _replay(folder, base) if trial.replayed else read_run(folder)
        except FuseError:
            return None

    @cache
    def saved(overrides: Overrides, trials: tuple[tuple[Path, Trial], ...]) -> float | None:
        known = _known(overrides)
        found = effect(run, known, cost(trials)) if known else None
        return found.seconds if found else None if known else 0.0

    @cache
    def cost(trials: tuple[tuple[Path, Trial], ...]) -> ProfiledCost:
        runs = [base, *(found for each in trials if (found := as_run(*each)))]
        return cost_of(with_floors(table, runs), runs)

    def predicted(one: Overrides, other: Overrides, replayed: bool) -> float | None:
        if not _settings({*one} ^ {*other}) <= KEYS:
            return None
        trials = tuple(later())
        before, after = saved(one, trials), saved(other, trials)
        if before is None or after is None:
            return None
        whole = sum(seconds for stage, seconds in run.stages.items() if not (replayed and stage == GENERATION))
        return (whole - after) / (whole - before) if before < whole else None

    @cache
    def more(overrides: Overrides) -> float | None:
        return more_at_limits(run, _known(overrides), cost(()))

    def guarded(function: Callable[..., float | None]) -> Callable[..., float | None]:
        """A search must not end because nothing can be predicted."""

        def found(*given: Any) -> float | None:
            try:
                return None if faults else function(*given)
            except _FAULTS as error:
                faults.append(error)
                note(f"nothing is predicted of further trials: {type(error).__name__}: {error}")
                return None

        return found

    return Foreseen(guarded(predicted), guarded(more), table.device.memory / (base.ranks if table.device.is_cpu else 1))


def _values(overrides: Collection[str]) -> dict[str, Any]:
    return {key_of(each): yaml.safe_load(each.partition("=")[2]) for each in overrides}


def _known(overrides: Collection[str]) -> dict[str, Any]:
    """Return the values by key of those that predictions know."""
    return {key: value for key, value in _values(overrides).items() if key in KEYS}


def _settings(overrides: Collection[str]) -> set[str]:
    """Return the keys of the settings that set these keys, or the keys themselves."""
    keys = map(key_of, overrides)
    return {key if (setting := setting_of(key)) is None else setting.key for key in keys}


def _measured(
    config: DictConfig, trial: Path, recording: float, limit: float
) -> tuple[RecordedWork, RecordedRun, ProfileTable]:
    """Return what a trial worked on, its run and the profile with its floors; a FuseError tells why there are none."""
    get, models = getter(config), cache(partial(model_of, config))
    if has_adapters(get):
        raise FuseError(f"{MODEL}.lora_rank={get(f'{MODEL}.lora_rank')}: not of runs with adapters")
    if get(f"{ACTOR}.strategy") not in _ENGINES:
        raise FuseError(f"{ACTOR}.strategy={get(f'{ACTOR}.strategy')}: needs {' or '.join(_ENGINES)}")
    run = _without_recording(read_run(trial), recording)
    stages = {name for step in run.steps for name in step.stages}
    for role in (ACTOR, *([CRITIC] if any("critic" in name or name == "values" for name in stages) else [])):
        models(role)
    out, log, tp = trial.parent / "profile.json", trial.parent / "profile.log", run.tp
    options = {
        "--model": Path(str(get(f"{MODEL}.path"))).expanduser(),
        "--device": get("trainer.device"),
        "--precision": get(f"{ROLLOUT}.dtype"),
        # Training engines cut no layer.
        "--tp": f"1,{tp}",
        "--out": out,
        # Ranks on a host share its cores.
        **({} if on_accelerators(get) else {"--beside": (get("trainer.n_gpus_per_node") or 1) - 1}),
    }
    command = [sys.executable, "-P", "-m", "verl_fuse", "profile", *_GRID]
    command += [str(each) for option in options.items() for each in option]
    with log.open("wb") as output:
        ending = child.run(command, os.environ, output, limit=limit)
    if ending.stopped_by is not None:
        raise KeyboardInterrupt
    if ending.late:
        raise FuseError(f"the profile of {models(ACTOR).name} was not done after {limit:.0f} s (log: {log})")
    if ending.code:
        why = error_of(log) or f"exit code {ending.code}"
        raise FuseError(f"the profile of {models(ACTOR).name}: {why} (log: {log})")
    seconds = {name: fmean(step.stages[name] for step in run.steps if name in step.stages) for name in stages}
    return RecordedWork(config, seconds, run.steps, models), run, with_floors(ProfileTable.read(out), [run])


def _replay(folder: Path, base: RecordedRun) -> RecordedRun:
    """Return the run of a trial that replayed the base's rollouts: of it no request is recorded, and the seconds of its
    generation are those of reading."""
    if (config := find_config(folder)) is None:
        raise FuseError(f"{folder}: its configuration is not there")
    run = run_of(folder.name, config, (), logged(folder).steps)
    steps = (
        replace(given, stages={stage: seconds for stage, seconds in step.stages.items() if stage != GENERATION})
        for step, given in zip(run.steps, base.steps, strict=False)
    )
    return replace(run, steps=tuple(steps))


def _without_recording(run: RecordedRun, seconds: float) -> RecordedRun:
    """Return the run as if no rollout had been recorded, which belongs to a step's generation."""
    steps = (
        replace(step, stages={**step.stages, GENERATION: max(step.stages[GENERATION] - seconds, 1e-3)})
        if GENERATION in step.stages
        else step
        for step in run.steps
    )
    return replace(run, steps=tuple(steps))
