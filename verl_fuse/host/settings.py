"""The `fuse` block of a verl configuration, checked in full before anything is started.

Imports neither verl nor ray, so that the driver can refuse a bad configuration before Ray is up.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pluggy
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.applied_plan import apply_plan, checked_plan
from verl_fuse.spec.block import bounded, read_block, without_effect
from verl_fuse.spec.plan import Plan, Setting


@dataclass(frozen=True)
class CoreBlock:
    """Keys directly under `fuse`; each is described in config/fuse/default.yaml."""

    run_dir: str | None = None
    plan: str | None = None
    disabled_plugins: tuple[str, ...] = ()
    poll_interval: float = field(default=0.05, metadata=bounded(minimum=0.001, maximum=60.0))
    stall_timeout: float = field(default=7200.0, metadata=bounded(minimum=1.0))
    call_timeout: float = field(default=14400.0, metadata=bounded(minimum=1.0))
    replica_timeout: float = field(default=300.0, metadata=bounded(minimum=1.0))
    weight_sync_timeout: float = field(default=600.0, metadata=bounded(minimum=1.0))


@dataclass(frozen=True)
class Settings:
    """The core block, one block per plugin, the plugins themselves, and the keys that a plan sets in verl's configuration; `idle` says of features that
    are off which of their keys are set for nothing."""

    core: CoreBlock
    blocks: Mapping[str, Any]
    manager: pluggy.PluginManager
    run_dir: Path
    overrides: Mapping[str, Setting] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


def load_settings(config: DictConfig) -> Settings:
    """Read and validate `config.fuse`; a FuseError lists everything that keeps the run from starting."""
    node = _fuse_node(config)
    core_names = {f.name for f in fields(CoreBlock)}
    core = read_block(CoreBlock, {key: value for key, value in node.items() if key in core_names}, "fuse")
    manager = plugins.load(core.disabled_plugins)
    schema = plugins.config_blocks(manager)
    plan = _plan(core, config, node)
    blocks = {name: read_block(block, node.get(name), f"fuse.{name}") for name, block in schema.items()}
    for key in node:
        if key in core_names or key in schema:
            continue
        if key in core.disabled_plugins:
            if isinstance(node[key], dict) and node[key].get("enabled"):
                raise FuseError(
                    f"fuse.{key}.enabled=true, but fuse.disabled_plugins leaves the plugin {key!r} out: drop one of the two"
                )
            continue
        allowed = ", ".join(sorted(core_names | set(schema)))
        raise FuseError(
            f"fuse.{key}: unknown key; allowed: {allowed}. A plugin's block needs the plugin to be installed and not disabled"
        )
    # What will run: the plan's keys are set only once these settings are there.
    planned = deepcopy(config)
    apply_plan(planned, plan.overrides if plan else {})
    problems = [str(problem) for found in manager.hook.fuse_validate(config=planned) if found for problem in found]
    if problems:
        raise FuseError("this configuration cannot run:\n  - " + "\n  - ".join(problems))
    idle = tuple(
        f"{', '.join(f'fuse.{name}.{key}={value!r}' for key, value in found.items())}: no effect while fuse.{name}.enabled=false"
        for name, block in blocks.items()
        if (found := without_effect(block))
    )
    run_dir = core.run_dir or OmegaConf.select(config, "trainer.default_local_dir", default="fuse_run")
    return Settings(core, blocks, manager, Path(run_dir).absolute(), plan.overrides if plan else {}, idle)


def _plan(core: CoreBlock, config: DictConfig, node: dict[str, Any]) -> Plan | None:
    """The plan the configuration names, checked; its migration threshold goes into `node`, unless one is set there."""
    if core.plan is None:
        return None
    enabled = {name for name, block in node.items() if isinstance(block, dict) and block.get("enabled") is True}
    plan = checked_plan(Path(core.plan), config, enabled)
    if "interstage" in plan.features and node["interstage"].get("migration_threshold") is None:
        node["interstage"]["migration_threshold"] = plan.migration_threshold or None
    return plan


def _fuse_node(config: DictConfig) -> dict[str, Any]:
    node = config.get("fuse") if isinstance(config, DictConfig) else None
    if node is None:
        return {}
    try:
        data = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise FuseError(f"fuse: cannot be resolved: {error}") from error
    if not isinstance(data, dict):
        raise FuseError(f"fuse={data!r}: needs a block; compose it with +fuse=default")
    return {str(key): value for key, value in data.items()}
