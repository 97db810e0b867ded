"""Tells why a run's configuration cannot run with more of verl-fuse switched on: makes the checks of the run itself,
without starting one."""

from collections.abc import Mapping, Sequence
from functools import cache, partial

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import copied, getter


def refused(config: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the refusals of `config` with these overrides (KEY=VALUE or +KEY=VALUE); none if the run can start."""
    try:
        load_settings(_changed(config, overrides))
    except FuseError as error:
        return tuple(map(str, error.args))
    return ()


class Refusals:
    """What refuses a run's configuration (None: it is not known) with more of verl-fuse switched on, beside what
    refuses it as it is; each set of overrides is checked once."""

    def __init__(self, config: DictConfig | None) -> None:
        self._known, self._config = config is not None, OmegaConf.create({}) if config is None else config
        self._found = cache(partial(refused, self._config))

    def beside(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        """Return the refusals of the configuration with these overrides that are none without them."""
        return tuple(line for line in self._found(overrides) if line not in self._found(()))

    def of(self, features: Mapping[str, Feature], *, whole: bool = True) -> dict[str, tuple[str, ...]]:
        """Return the refusals by feature; none where no configuration is known. One that is not `whole` is not refused
        for a key that it does not have."""
        if not self._known:
            return dict.fromkeys(features, ())
        found = {}
        for name, feature in features.items():
            get, lines = getter(_changed(self._config, feature.overrides)), self.beside(feature.overrides)
            found[name] = tuple(line for line in lines if whole or get(key_of(line)) is not None)
        return found

    def together(self, one: Feature, other: Feature) -> tuple[str, ...]:
        """Return the refusals of two features together that neither has alone, or else why one leaves the other nothing
        to do, in this configuration; where none is known, refusals in one that says nothing."""
        alone = {*self._found(one.overrides), *self._found(other.overrides)}
        both = (*one.overrides, *other.overrides)
        lines = [line for line in self._found(both) if line not in alone]
        if self._known and not lines:
            plain, changed = getter(self._config), getter(_changed(self._config, both))
            reasons = [(feature.idle(plain), feature.idle(changed)) for feature in (one, other)]
            lines = [after for before, after in reasons if after and not before]
        return tuple(lines)


def idle_in(config: DictConfig | None, features: Mapping[str, Feature]) -> dict[str, str]:
    """Return by feature why it has nothing to do in this configuration."""
    if config is None:
        return {}
    get = getter(config)
    return {name: why for name, one in features.items() if (why := one.idle(get))}


def _changed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    changed = copied(config)
    OmegaConf.set_struct(changed, False)
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(changed, key, yaml.safe_load(value), force_add=True)
    return changed
