"""Tells why a run's configuration cannot run with more of verl-fuse switched on: makes the checks of the run itself,
without starting one."""

from collections.abc import Sequence
from copy import deepcopy

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.settings import load_settings


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
