"""Checks names that verl looks up among its registered trainers, rollout engines, when its workers are up, and
advantage estimators, after the first rollout. The names of the last two are read from verl's source.

Invariant (tests/unit/host/test_registered.py): a name is left to verl where code of the user's, which may register it,
can reach the process that trains: by a key of the configuration, another plugin of verl or of verl-fuse, an external
module, a Ray cluster that is there before the run, or a main program of the user's.
"""

import ast
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_fuse import plugins
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.compat.source import NotFound, SourceTree
from verl_fuse.host.start.inspect import DISTRIBUTION, VERL_PLUGIN_GROUP
from verl_fuse.host.start.resumption import named_cluster
from verl_fuse.spec.block import nearest
from verl_fuse.spec.composed import ROLLOUT, getter, is_legacy, is_validation_only
from verl_fuse.spec.step import Refusal

# The module of verl that registers names, and the call that does.
_ENGINES = ("verl.workers.rollout.replica", "RolloutReplicaRegistry.register")
_ESTIMATORS = ("verl.trainer.ppo.core_algos", "register_adv_est")
_ENUM = "AdvantageEstimator"
# The trainers of V1, by the names that verl and verl-fuse register.
_MODE, _MODES = "trainer.v1.trainer_mode", ("sync", "colocate_async", "separate_async", TRAINER_MODE)
# The process that trains imports what these keys name.
_OWN_CODE = (
    "*.external_lib",
    "*_class",
    "*.class_path",
    "*.custom_backend_module",
    "*.router_config_path",
    "*.tool_config_path",
    "*.function_tool_path",
    "*.custom_cls.path",
    "*.custom_sampler.path",
    "*.datagen.path",
    "*.module.path",
    "*.runtime_env.*",
)


def name_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a trainer, a rollout engine or an advantage estimator that nothing registers."""
    get = getter(config)
    if is_legacy(config) or _own_code(config):
        return
    if isinstance(mode := get(_MODE), str) and mode not in _MODES:
        yield Refusal(_MODE, mode, f"not registered in verl{nearest(mode, _MODES)}; allowed: {', '.join(_MODES)}")
    looked_up: list[tuple[str, tuple[str, str]]] = [(f"{ROLLOUT}.name", _ENGINES)]
    if not is_validation_only(get):
        looked_up.append(("algorithm.adv_estimator", _ESTIMATORS))
    for key, registry in looked_up:
        name, known = get(key), _registered(*registry)
        if isinstance(name, str) and known and name not in known:
            allowed = f"not registered in verl{nearest(name, known)}; allowed: {', '.join(known)}"
            yield Refusal(key, name, f"{allowed}, or what a module in actor_rollout_ref.model.external_lib registers")


def _own_code(config: DictConfig) -> bool:
    """Tell whether code of the user's may reach the process that trains."""
    installed = [*entry_points(group=VERL_PLUGIN_GROUP), *entry_points(group=plugins.PLUGIN_GROUP)]
    return bool(
        named_cluster(getter(config))
        or os.environ.get("VERL_USE_EXTERNAL_MODULES")
        or any(entry.dist is None or entry.dist.name != DISTRIBUTION for entry in installed)
        or any(fnmatch(key, pattern) for key, _ in _set(config) for pattern in _OWN_CODE)
        or any(key.endswith("_target_") and not _is_known(key, str(value)) for key, value in _set(config))
    )


def _is_known(key: str, target: str) -> bool:
    """Tell whether the class that a key names is verl's, or one that composes the configuration."""
    return target.partition(".")[0] == "verl" or key.startswith("hydra.")


def _set(block: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys that have a value, and the values."""
    for name in block:
        try:
            value: Any = block[name]
        except OmegaConfBaseException:
            continue
        if isinstance(value, DictConfig):
            yield from _set(value, f"{path}{name}.")
        elif value not in (None, ""):
            yield f"{path}{name}", value


@cache
def _registered(module: str, call: str) -> tuple[str, ...]:
    """Return the texts that this module of the installed verl registers with `call`, or names in its enumeration; none
    where it cannot be read."""
    try:
        nodes = list(ast.walk(SourceTree.installed("verl").module(module)))
    except NotFound:
        return ()
    values = [node.args[0] for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == call]
    enums = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == _ENUM]
    values += [field.value for enum in enums for field in enum.body if isinstance(field, ast.Assign)]
    found = (value.value for value in values if isinstance(value, ast.Constant))
    return tuple(sorted({value for value in found if isinstance(value, str)}))
