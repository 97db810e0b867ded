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
from verl_fuse.spec.composed import getter

if TYPE_CHECKING:
    # Numba, which the simulator needs, takes a second to import.
    from verl_fuse.advice import Excluded


def refused(config: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the refusals of `config` with these overrides (KEY=VALUE or +KEY=VALUE); none if the run can start."""
    try:
        load_settings(_changed(config, overrides))
    except FuseError as error:
        return tuple(map(str, error.args))
    return ()


def _changed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    changed = deepcopy(config)
    OmegaConf.set_struct(changed, False)
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(changed, key, yaml.safe_load(value), force_add=True)
    return changed


def excluded(config: DictConfig | None) -> "Excluded":
    """Return the function that finds the refusals of two features together that neither has alone, and why one leaves
    the other nothing to do, in this configuration; where it is None, refusals in one that says nothing."""
    base = OmegaConf.create({}) if config is None else config

    @cache
    def found(overrides: tuple[str, ...]) -> tuple[str, ...]:
        return refused(base, overrides)

    def together(one: Feature, other: Feature) -> tuple[str, ...]:
        alone, both = {*found(one.overrides), *found(other.overrides)}, (*one.overrides, *other.overrides)
        lines = [line for line in found(both) if line not in alone]
        if config is not None and not lines:
            plain, changed = getter(base), getter(_changed(base, both))
            reasons = [(feature.idle(plain), feature.idle(changed)) for feature in (one, other)]
            lines = [after for before, after in reasons if after and not before]
        return tuple(lines)

    return together
