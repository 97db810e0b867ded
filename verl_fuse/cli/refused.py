"""Tells why a run's configuration cannot run with more of verl-fuse switched on: makes the checks of the run itself,
without starting one."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import copied, getter

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


def refused_beside(config: DictConfig, overrides: Sequence[str], alone: Sequence[str]) -> tuple[str, ...]:
    """Return the refusals of `config` with these overrides that are not among those of it `alone`."""
    return tuple(line for line in refused(config, overrides) if line not in alone)


def refusals_of(
    config: DictConfig | None, features: Mapping[str, Feature], *, whole: bool = True
) -> dict[str, tuple[str, ...]]:
    """Return by feature the refusals of the configuration with the feature that are no refusals without it; no refusal
    where no configuration is known. One that is not `whole` is not refused for a key that it does not have."""
    if config is None:
        return dict.fromkeys(features, ())
    alone, found = refused(config, ()), {}
    for name, feature in features.items():
        get, lines = getter(_changed(config, feature.overrides)), refused_beside(config, feature.overrides, alone)
        found[name] = tuple(line for line in lines if whole or get(key_of(line)) is not None)
    return found


def idle_in(config: DictConfig | None, features: Mapping[str, Feature]) -> dict[str, str]:
    """Return by feature why it has nothing to do in this configuration."""
    get = getter(OmegaConf.create({}) if config is None else config)
    return {} if config is None else {name: why for name, one in features.items() if (why := one.idle(get))}


def open_features(
    features: Mapping[str, Feature], refusals: Mapping[str, Sequence[str]], idle: Mapping[str, str], on: Sequence[str]
) -> set[str]:
    """Return the features that a run could have on, and has not."""
    return {name for name in features if not (refusals[name] or name in idle or name in on)}


def _changed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    changed = copied(config)
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
