"""Tells why a run's configuration cannot run with more of verl-fuse switched on: makes the checks of the run itself,
without starting one."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature
from verl_fuse.host.start.settings import load_settings

if TYPE_CHECKING:
    # Numba, which the simulator needs, takes a second to import.
    from verl_fuse.advice import Excluded


def refused(config: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the refusals of `config` with these overrides (KEY=VALUE or +KEY=VALUE); none if the run can start."""
    changed = deepcopy(config)
    OmegaConf.set_struct(changed, False)
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(changed, key, yaml.safe_load(value), force_add=True)
    try:
        load_settings(changed)
    except FuseError as error:
        return tuple(map(str, error.args))
    return ()


def excluded(config: DictConfig | None) -> "Excluded":
    """Return the function that finds the refusals of two features together that neither has alone, in this
    configuration; in one that says nothing, where it is None."""
    base = OmegaConf.create({}) if config is None else config

    @cache
    def found(overrides: tuple[str, ...]) -> tuple[str, ...]:
        return refused(base, overrides)

    def together(one: Feature, other: Feature) -> tuple[str, ...]:
        alone = {*found(one.overrides), *found(other.overrides)}
        return tuple(line for line in found((*one.overrides, *other.overrides)) if line not in alone)

    return together
