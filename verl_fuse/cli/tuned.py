"""What `verl-fuse tune` tunes: a recipe with overrides, or a run of stock verl by the arguments of its main_ppo.

Invariants (tests/unit/cli/test_tuned.py):
- a feature is tried only where nothing refuses it and it has something to do;
- a base composes to what its command trains with, whatever is overridden;
- nothing is written into the folder that the arguments name, nor into the working directory, nor into a checkpoint.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from verl_fuse.cli.check import PRESET
from verl_fuse.cli.composition import compose, what_fits
from verl_fuse.cli.launch import read_run
from verl_fuse.cli.recipes import Recipe
from verl_fuse.cli.run import PlannedRun, plan, planned
from verl_fuse.cli.shell import TRAINER, launch_of
from verl_fuse.errors import FuseError
from verl_fuse.feature import SWITCH
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.preset import Choice
from verl_fuse.host.start.settings import foreseen
from verl_fuse.host.upstream.checkpoints import STEP_FOLDER, step_of
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import getter, has_key
from verl_fuse.tune.candidates import Candidate
from verl_fuse.tune.setting import FEATURES, Setting
from verl_fuse.tune.trial import Overrides

# Where the configuration has a choice already, which may be one with features.
_CHOSEN = SWITCH[0].lstrip("+")
# Hydra's own folder would be in the working directory.
_HYDRA = "hydra.run.dir=${trainer.default_local_dir}/hydra"


@dataclass(frozen=True)
class Base:
    """A name for folders, a function that returns the configuration with overrides, and one that plans a run with
    overrides in a home; both raise a FuseError that lists what is wrong. Trials begin after step `start` of the folder
    `checkpoint` (None: from the model). `switch` gives the run the block `fuse` of its trials, without features."""

    name: str
    compose: Callable[[Sequence[str]], DictConfig]
    plan: Callable[[list[str], Path], PlannedRun]
    start: int = 0
    checkpoint: Path | None = None
    switch: tuple[str, ...] = (_CHOSEN,)

    def first_steps(self, number: int) -> range:
        """Return so many steps after the start."""
        return range(self.start + 1, self.start + number + 1)


def features_of(base: Base, changes: Sequence[str]) -> tuple[Candidate, ...]:
    """Return the features that a preset would switch on beside these changes, as candidates: each with the keys that
    the preset sets beside its switch. As in `verl-fuse check`, verl's mode is no reason against them."""
    config = base.compose([*changes, SWITCH[1]])
    return tuple(_as_candidate(config, choice) for choice in foreseen(config, PRESET) if not choice.reasons)


def _as_candidate(config: DictConfig, choice: Choice) -> Candidate:
    keys = {f"{FEATURES}{key}": value for key, value in choice.keys.items()}
    switch, reason = f"{FEATURES}{choice.feature.switch}", f"fuse.preset={PRESET} switches it on"
    setting = Setting(switch, "feature", (), False, (True,), reason, (), rounds=True, sets={True: keys})
    return Candidate(setting, False, (True,), frozenset(key for key in keys if has_key(config, key)))


def switched_on(base: Base, overrides: Overrides) -> Overrides:
    """Return overrides of the run itself: where there is a feature among them, with those that switch verl-fuse on."""
    if not any(key_of(override).startswith(FEATURES) for override in overrides):
        return overrides
    mode = getter(base.compose(()))(key_of(SWITCH[1]))
    return (*base.switch, *(() if mode == TRAINER_MODE else SWITCH[1:]), *overrides)


def beginning_at(base: Base, checkpoint: Path) -> Base:
    """Return a base whose trials begin with the weights of a checkpoint of verl, which they read and never write; a
    FuseError tells why the folder is none."""
    step, folder = step_of(checkpoint.name), checkpoint.absolute()
    if step is None or not (folder / "actor").is_dir():
        raise FuseError(f"--checkpoint {checkpoint}: needs a folder {STEP_FOLDER}N of a run, with actor/ in it")
    return replace(base, start=step, checkpoint=folder)


def base_of_recipe(recipe: Recipe, given: Sequence[str]) -> Base:
    given = [*given, _CHOSEN]
    return Base(
        recipe.name,
        lambda changes: compose(recipe, [*given, *changes]),
        lambda changes, home: plan(recipe, [*given, *changes], baseline=False, home=home),
    )


def are_arguments(words: Sequence[str]) -> bool:
    """Tell whether words are arguments of main_ppo, or a command that starts it, and no name of a recipe."""
    return "=" in words[0] or words[0].startswith(("-", "+", "~")) or launch_of(words) is not None


def _before(words: Sequence[str], trainer: str) -> str:
    """Return what stands before the trainer and is no plain call of Python."""
    before = [*words[: words.index(trainer)]]
    plain = [[], *([each, *m] for each in ("python", "python3", sys.executable) for m in (["-m"], []))]
    return "" if before in plain else " ".join(before)


def base_of_arguments(words: Sequence[str]) -> Base:
    """Return the base of a run that the words launch; a FuseError names what cannot be read."""
    launch = launch_of(words)
    if launch is not None and not launch.is_verl_s:
        raise FuseError(f"{launch.trainer}: needs {TRAINER}, which trials run, or the name of a recipe")
    if launch is not None and (before := _before(words, launch.trainer)):
        raise FuseError(
            f"{before}: trials start {TRAINER} themselves; set variables in the environment, and leave it out"
        )
    run = read_run(words, None)
    source = run.source
    if source is None:
        raise FuseError(f"{' '.join(words)}: needs arguments of {TRAINER}")
    switch = SWITCH[0] if not run.has_fuse or SWITCH[0] in run.arguments else _CHOSEN
    given = [switch, *(word for word in run.arguments if word != SWITCH[0])]

    def fitting(changes: Sequence[str]) -> DictConfig:
        config, problems = what_fits(source, [*given, *changes])
        if problems:
            raise FuseError(*problems)
        return config

    def run_with(changes: list[str], home: Path) -> PlannedRun:
        chosen = [*given, *changes, _HYDRA]
        return planned(*what_fits(source, chosen), [*run.options, *chosen], home)

    return Base("main_ppo", fitting, run_with, switch=tuple({switch} - {*run.arguments}))
