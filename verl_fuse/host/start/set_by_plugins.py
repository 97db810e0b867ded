"""Sets the keys of verl's configuration that plugins choose (`fuse_overrides`). Imports neither verl nor ray.

Invariants (tests/unit/host/test_set_by_plugins.py):
- a key that two plugins set to different values ends the run, with no key set;
- keys that verl's YAML lacks are added;
- a block of `fuse` in which a plugin sets a key is read again, so that every plugin sees the key's new value;
- the configuration checked before a run starts is the configuration it is started with.
"""

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.applied_plan import apply_plan
from verl_fuse.host.start.settings import Settings
from verl_fuse.spec.block import read_block
from verl_fuse.spec.composed import copied


def set_by_plugins(config: DictConfig, settings: Settings) -> Settings:
    """Set in `config` the values that the run's plugins choose; return the settings with them."""
    wanted: dict[str, Any] = {}
    for found in settings.manager.hook.fuse_overrides(config=config, run_dir=settings.run_dir):
        for key, value in (found or {}).items():
            if wanted.setdefault(key, value) != value:
                raise FuseError(f"two plugins set {key}: to {wanted[key]!r} and to {value!r}; leave one of them out")
    for key, value in wanted.items():
        OmegaConf.update(config, key, value, force_add=True)
    blocks = dict(settings.blocks)
    for name in {key.split(".")[1] for key in wanted if key.startswith("fuse.")} & blocks.keys():
        data: Any = OmegaConf.to_container(config.fuse[name], resolve=True)
        blocks[name] = read_block(type(blocks[name]), data, f"fuse.{name}")
    return replace(settings, blocks=blocks)


def as_started(config: DictConfig, settings: Settings) -> DictConfig:
    """Return a copy of `config` with the values that the run sets in it: its plan, and its plugins' choices."""
    changed = copied(config)
    apply_plan(changed, settings.overrides)
    set_by_plugins(changed, settings)
    return changed
