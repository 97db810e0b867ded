"""Sets the keys of verl's configuration that plugins choose (`fuse_overrides`). Imports neither verl nor ray.

Invariants (tests/unit/host/test_set_by_plugins.py):
- a key that two plugins set to different values ends the run, with no key set;
- keys that verl's YAML lacks are added;
- the configuration checked before a run starts is the configuration it is started with.
"""

from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.applied_plan import apply_plan
from verl_fuse.host.start.settings import Settings


def set_by_plugins(config: DictConfig, settings: Settings) -> None:
    """Set in `config` the values that the run's plugins choose."""
    wanted: dict[str, Any] = {}
    for found in settings.manager.hook.fuse_overrides(config=config, run_dir=settings.run_dir):
        for key, value in (found or {}).items():
            if wanted.setdefault(key, value) != value:
                raise FuseError(f"two plugins set {key}: to {wanted[key]!r} and to {value!r}; leave one of them out")
    for key, value in wanted.items():
        OmegaConf.update(config, key, value, force_add=True)


def as_started(config: DictConfig, settings: Settings) -> DictConfig:
    """Return a copy of `config` with the values that the run sets in it: its plan, and its plugins' choices."""
    copied = deepcopy(config)
    apply_plan(copied, settings.overrides)
    set_by_plugins(copied, settings)
    return copied
