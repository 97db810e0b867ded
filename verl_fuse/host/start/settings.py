"""Reads the `fuse` block of a verl configuration, and checks all of it before anything is started.

Imports neither verl nor ray, so that the driver can refuse a bad configuration before Ray is up.
"""

import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pluggy
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse import plugins
from verl_fuse.compare.run import METRICS_FILE, METRICS_PATH_VARIABLE
from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature, PresetName
from verl_fuse.host import config as fuse_config
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.adapters import adapter_refusals
from verl_fuse.host.start.applied_plan import ADDED, apply_plan, checked_plan, overrides_of
from verl_fuse.host.start.data_rows import row_refusals
from verl_fuse.host.start.launch_values import value_refusals
from verl_fuse.host.start.micro_batches import micro_batch_refusals
from verl_fuse.host.start.mini_batches import batch_refusals, mini_batch_refusals
from verl_fuse.host.start.out_of_reach import out_of_reach
from verl_fuse.host.start.preset import Choice, Problems, choose, slower_features, unlocked, with_keys
from verl_fuse.host.start.registered import name_refusals
from verl_fuse.host.start.resumption import resume_refusals, step_refusals
from verl_fuse.host.start.value_types import type_refusals
from verl_fuse.spec.block import bounded, nearest, quoted, read_block, undecided, waiting, without_effect, written
from verl_fuse.spec.composed import Get, copied, getter
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.step import Refusal

T = TypeVar("T")
Refuses = Callable[[DictConfig], Iterable[object]]

_CHECKS: tuple[Refuses, ...] = (micro_batch_refusals, mini_batch_refusals, adapter_refusals)
# They look at what a recorded run need not have any more, such as its files, or at what a script need not tell.
_CHECKS_OF_START: tuple[Refuses, ...] = (row_refusals, resume_refusals, step_refusals)
# Of verl's own main program: another one may register names, and make other demands on batches.
_CHECKS_OF_MAIN: tuple[Refuses, ...] = (batch_refusals, value_refusals, name_refusals)


@dataclass(frozen=True)
class CoreBlock:
    """Keys directly under `fuse`; each is described in config/fuse/default.yaml."""

    run_dir: str | None = None
    preset: PresetName = "observe"
    plan: str | None = None
    disabled_plugins: tuple[str, ...] = ()
    poll_interval: float = field(default=0.05, metadata=bounded(minimum=0.001, maximum=60.0))
    stall_timeout: float = field(default=7200.0, metadata=waiting())
    call_timeout: float = field(default=14400.0, metadata=waiting())
    replica_timeout: float = field(default=300.0, metadata=waiting())
    weight_sync_timeout: float = field(default=600.0, metadata=waiting())


@dataclass(frozen=True)
class Settings:
    """The core block, one block per plugin, the plugins themselves, the keys that a plan sets in the configuration, and
    the plan's seconds of each stage of a step; `idle` lists the keys that are set for features that are off, `slower`
    the features that are on and were measured to be slower on these devices, `chosen` the features that `fuse.preset`
    switches on and the others, with the reason, `unlogged` what this run lacks to be compared later."""

    core: CoreBlock
    blocks: Mapping[str, Any]
    manager: pluggy.PluginManager
    run_dir: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    planned_seconds: Mapping[str, float] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    unlogged: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the lines for the user at the start."""
        warnings = (f"warning: {line}" for line in (*self.idle, *self.slower))
        return (*self.chosen, *warnings, *filter(None, [self.unlogged]))


def load_settings(config: DictConfig, *, starting: bool = False, own_program: bool = False) -> Settings:
    """Read and validate `config.fuse`; a FuseError lists everything that keeps the run from starting, with `starting`
    its data, its checkpoint, its batches and, unless the run starts from an `own_program` of the user's, the names
    that verl looks up too. Otherwise the keys left to `fuse.preset` are set in `config`."""
    node = _fuse_node(config)
    problems: list[object] = []
    core_names = {f.name for f in fields(CoreBlock)}
    own = {key: value for key, value in node.items() if key in core_names}
    core = _read(problems, read_block, CoreBlock, own, "fuse") or CoreBlock()
    manager = plugins.load(core.disabled_plugins)
    schema, features = plugins.config_blocks(manager), tuple(plugins.features(manager).values())
    # Below, a run without a block `fuse` gets one.
    problems += _read(problems, _found, config, out_of_reach) or ()
    # Other checks compute with these values.
    mistyped = _read(problems, _found, config, type_refusals) or []
    problems += mistyped
    left, chosen = (
        ({}, ()) if mistyped else _read(problems, _decided, config, core, manager, schema, features) or ({}, ())
    )
    decided = with_keys(config, left)
    node = _fuse_node(decided)
    plan = _read(problems, _plan, core, config, node)
    overrides = overrides_of(plan, node) if plan else {}
    for key, value in overrides.items():
        if key.startswith(f"{ADDED}fuse."):
            block, name = key.split(".")[1:]
            if isinstance(there := node.get(block) or {}, Mapping):
                node[block] = {**there, name: value}
    read = {name: _read(problems, read_block, block, node.get(name), f"fuse.{name}") for name, block in schema.items()}
    problems += _unknown(node, core, core_names | set(schema))
    checked = _without(_as_planned(decided, overrides), [name for name, block in read.items() if block is None])
    if not mistyped:
        problems += _read(problems, _problems, manager, checked) or ()
        of_start = (*_CHECKS_OF_START, *(() if own_program else _CHECKS_OF_MAIN)) if starting else ()
        problems += _read(problems, _found, checked, *of_start) or ()
    if problems:
        raise FuseError(*map(str, problems))
    for key, value in left.items():
        OmegaConf.update(config, f"fuse.{key}", value, force_add=True)
    blocks: dict[str, Any] = dict(read)
    idle = tuple(line for name, block in blocks.items() for line in _idle(f"fuse.{name}", block))
    get = getter(config)
    run_dir = core.run_dir or get("trainer.default_local_dir") or "fuse_run"
    foreseen = plan.planned_seconds if plan else {}
    slower = tuple(slower_features(decided, features))
    folder = Path(run_dir).absolute()
    unlogged = _unlogged(get, folder)
    return Settings(core, blocks, manager, folder, overrides, foreseen, idle, slower, chosen, unlogged)


def barring(config: DictConfig) -> list[object]:
    """Return what keeps verl-fuse from this run with any feature, or from judging it."""
    return _found(config, out_of_reach, type_refusals)


def main_refusals(config: DictConfig) -> list[Refusal]:
    """Return what verl's own main program demands of batches and of registered names, and this run has not."""
    return [one for one in _found(config, *_CHECKS_OF_MAIN) if isinstance(one, Refusal)]


def foreseen(config: DictConfig, preset: PresetName) -> tuple[Choice, ...]:
    """Return the choices of `preset` in a configuration that may be refused as a whole. What keeps verl-fuse from such
    a run, or from judging it, is the reason against every feature."""
    features, problems = _judges(config)
    barred = barring(config)
    if not barred:
        try:
            return choose(config, preset, features, problems)[1]
        except FuseError as error:
            barred = list(error.args)
    return tuple(Choice(preset, one, {}, tuple(barred)) for one in features if preset in one.presets)


def unlocking(config: DictConfig, choices: Sequence[Choice]) -> dict[str, Mapping[str, Any]]:
    """Return, by the switches of features that are off, the keys of verl's configuration, with values, that unlock
    each; none where none are known."""
    judges = _judges(config)
    return {one.feature.switch: unlocked(config, one, *judges) for one in choices if one.reasons}


def _judges(config: DictConfig) -> tuple[tuple[Feature, ...], Problems]:
    """Return the features of a run's plugins, and what finds the run's refusals."""
    manager = plugins.load(tuple(_fuse_node(config).get("disabled_plugins") or ()))
    return tuple(plugins.features(manager).values()), partial(_problems, manager)


def _decided(
    config: DictConfig,
    core: CoreBlock,
    manager: pluggy.PluginManager,
    schema: Mapping[str, type],
    features: Collection[Feature],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (the keys of `fuse` that are left to the preset, with their values; the preset's line on each feature)."""
    keys, choices = choose(config, core.preset, features, partial(_problems, manager))
    otherwise = {f"{name}.{key}": value for name, block in schema.items() for key, value in undecided(block).items()}
    get = getter(config)
    chosen = tuple(map(str, choices))
    return {key: value for key, value in (otherwise | keys).items() if get(f"fuse.{key}") is None}, chosen


def _read(problems: list[object], read: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of `read(*arguments)`; None where it refuses, with its problems added to `problems`."""
    try:
        return read(*arguments)
    except FuseError as error:
        problems.extend(error.args)
        return None


def _unknown(node: Mapping[str, Any], core: CoreBlock, known: Collection[str]) -> Iterator[str]:
    for key, value in node.items():
        if key in known:
            continue
        if key in core.disabled_plugins:
            if isinstance(value, dict) and value.get("enabled"):
                yield (
                    f"fuse.{key}.enabled=true, but fuse.disabled_plugins leaves the plugin {key!r} out: drop one of "
                    "the two"
                )
            continue
        if key in plugins.BUILTIN:
            # Its folder was deleted; its defaults are composed nevertheless.
            shipped = OmegaConf.load(Path(fuse_config.__file__).parent / "fuse/default.yaml")
            if value != shipped.fuse.get(key):
                yield f"fuse.{key}={quoted(value)}: the plugin {key!r} is not installed; reinstall verl-fuse to have it"
            continue
        allowed = ", ".join(sorted(known))
        yield (
            f"fuse.{key}: unknown key{nearest(key, known)}; allowed: {allowed}. A plugin's block needs the plugin to "
            "be installed and not disabled"
        )


def _problems(manager: pluggy.PluginManager, config: DictConfig) -> list[object]:
    def of_plugins(config: DictConfig) -> list[object]:
        return [problem for found in manager.hook.fuse_validate(config=config) for problem in found or ()]

    return _found(config, of_plugins, *_CHECKS)


def _found(config: DictConfig, *checks: Refuses) -> list[object]:
    try:
        return [problem for check in checks for problem in check(config)]
    except (ArithmeticError, LookupError, TypeError, ValueError, OmegaConfBaseException) as error:
        # A value has an unexpected type; the line that met it names the key.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise FuseError(
            f"this configuration cannot be checked: {type(error).__name__}: {error} ({Path(frame.filename).name}, line "
            f"{frame.lineno}: {frame.line})"
        ) from error


def _idle(where: str, block: Any) -> Iterator[str]:
    for why, found in without_effect(block).items():
        keys = ", ".join(f"{where}.{key}={quoted(value)}" for key, value in found.items())
        yield f"{keys}: no effect while {' and '.join(f'{where}.{key}={written(value)}' for key, value in why)}"


def _unlogged(get: Get, run_dir: Path) -> str | None:
    """Return a sentence on what a run of mode `fuse` lacks to be compared later; None where it lacks nothing."""
    loggers, path = get("trainer.logger"), run_dir / METRICS_FILE
    lacks = []
    if "file" not in ([loggers] if isinstance(loggers, str) else loggers or ()):
        lacks.append("file in trainer.logger")
    if os.environ.get(METRICS_PATH_VARIABLE) != str(path):
        lacks.append(f"{METRICS_PATH_VARIABLE}={path} in the driver's environment")
    if get("trainer.v1.trainer_mode") != TRAINER_MODE or not lacks:
        return None
    return f"verl-fuse compare will lack the metrics of this run: needs {' and '.join(lacks)}"


def _without(config: DictConfig, refused: Sequence[str]) -> DictConfig:
    """Return the configuration with nothing but the switch in each block that is `refused`: the other faults of the run
    are then found beside the bad values."""
    if not refused:
        return config
    config = copied(config)
    for name in refused:
        enabled = OmegaConf.select(config, f"fuse.{name}.enabled") is True
        OmegaConf.update(config, f"fuse.{name}", {"enabled": enabled}, merge=False, force_add=True)
    return config


def _as_planned(config: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Return the configuration that a run with this plan has: its refusals are found before the run starts."""
    if not overrides:
        return config
    config = copied(config)
    apply_plan(config, overrides)
    return config


def _plan(core: CoreBlock, config: DictConfig, node: Mapping[str, Any]) -> Plan | None:
    """Return the plan that the configuration names, checked."""
    if core.plan is None:
        return None
    if core.preset != "observe":
        raise FuseError(
            f"fuse.preset={core.preset!r}: a plan (fuse.plan) says itself what is switched on; allowed: observe"
        )
    enabled = {name for name, block in node.items() if isinstance(block, dict) and block.get("enabled") is True}
    return checked_plan(Path(core.plan), config, enabled, core.disabled_plugins)


def _fuse_node(config: DictConfig) -> dict[str, Any]:
    node = config.get("fuse") if isinstance(config, DictConfig) else None
    if node is None:
        return {}
    try:
        data = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise FuseError(f"fuse: cannot be resolved: {error}") from error
    if not isinstance(data, dict):
        raise FuseError(f"fuse={quoted(data)}: needs a block; compose it with +fuse=default")
    return {str(key): value for key, value in data.items()}
