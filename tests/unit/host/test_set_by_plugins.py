"""Shows the invariants of `verl_fuse.host.start.set_by_plugins`."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.set_by_plugins import as_started, set_by_plugins
from verl_fuse.host.start.settings import load_settings

SETS = """
from verl_fuse.hookspecs import hookimpl

class {name}:
    HOOK_API = 2

    @hookimpl
    def fuse_overrides(self, config, run_dir):
        return {{"engine.steps": {value}, "engine.folder": str(run_dir / config.trainer.name)}}
"""


@pytest.fixture
def config():
    config = OmegaConf.create({"trainer": {"name": "x"}, "engine": {"folder": None}, "fuse": {"run_dir": "/runs"}})
    OmegaConf.set_struct(config, True)
    return config


def test_what_plugins_set_is_set_and_keys_that_are_missing_are_added(config, installed_plugin):
    installed_plugin("one", SETS.format(name="One", value=3), distribution="acme-one", value="acme_one_one:One")
    set_by_plugins(config, load_settings(config))
    assert (config.engine.steps, config.engine.folder) == (3, "/runs/x")


def test_two_plugins_that_disagree_end_the_run_with_nothing_set(config, installed_plugin):
    for name, value in (("one", 3), ("two", 4)):
        source = SETS.format(name=name.title(), value=value)
        installed_plugin(name, source, distribution=f"acme-{name}", value=f"acme_{name}_{name}:{name.title()}")
    with pytest.raises(FuseError, match=r"two plugins set engine\.steps"):
        set_by_plugins(config, load_settings(config))
    assert "steps" not in config.engine
    assert config.engine.folder is None


def test_what_is_checked_is_a_copy_with_all_that_is_set(config, installed_plugin):
    installed_plugin("one", SETS.format(name="One", value=3), distribution="acme-one", value="acme_one_one:One")
    found = as_started(config, load_settings(config))
    assert (found.engine.steps, found.engine.folder) == (3, "/runs/x")
    assert "steps" not in config.engine
    assert config.engine.folder is None


SETS_A_BLOCK = """
from verl_fuse.hookspecs import hookimpl

class Chooses:
    HOOK_API = 2

    @hookimpl
    def fuse_overrides(self, config, run_dir):
        return {"fuse.placement.critic": {"first": 1, "devices": 1}, "fuse.elastic.max_replicas": 3}
"""


def test_a_block_in_which_a_key_is_set_is_read_again(config, installed_plugin):
    OmegaConf.update(config, "fuse.elastic", {"enabled": False, "price": 2.0}, force_add=True)
    installed_plugin("chooses", SETS_A_BLOCK, distribution="acme-chooses", value="acme_chooses_chooses:Chooses")
    before = load_settings(config)
    after = set_by_plugins(config, before)
    assert config.fuse.placement.critic == {"first": 1, "devices": 1}
    assert (before.blocks["elastic"].max_replicas, before.blocks["placement"].critic) == (None, None)
    assert (after.blocks["elastic"].max_replicas, after.blocks["elastic"].price) == (3, 2.0)
    assert (after.blocks["placement"].critic.first, after.blocks["placement"].defer) == (1, False)
    assert after.blocks["interstage"] is before.blocks["interstage"]
