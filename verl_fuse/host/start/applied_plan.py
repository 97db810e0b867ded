"""Checks a plan file (`fuse.plan`) against the configuration of the run, and applies it. Imports neither verl nor ray.

Invariants (tests/unit/host/test_applied_plan.py):
- a plan that this run could carry out only in part is refused, with every reason;
- the demands of features are checked on the configuration with the plan in it;
- the plan's keys win over the configuration's, except a migration threshold or a schedule that the user has set;
- a critic's devices, or a number of replicas, that the user has set and the plan has otherwise are refused.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import written
from verl_fuse.spec.plan import Plan

# These keys decide where devices are; a run is started on the devices before the plan is read.
_FIXED = ("trainer.nnodes", "trainer.n_gpus_per_node")
# The mark stands before a key that verl reads but its YAML lacks, like on Hydra's command line.
ADDED = "++"
# The plan's seconds hold for these keys: a run with another value does not carry the plan out.
_BINDING = ("placement.critic", "elastic.max_replicas")
# The keys that a plan sets under `fuse`, and their values where the user has not set them.
_UNSET = {
    "interstage.migration_threshold": None,
    "pipeline.schedule": "auto",
    "placement.critic": None,
    "placement.defer": False,
    "elastic.max_replicas": None,
}
_ABSENT = object()


def checked_plan(path: Path, config: DictConfig, enabled: Collection[str], disabled: Collection[str] = ()) -> Plan:
    """Read a plan; a FuseError lists everything that keeps this run, with the features `enabled` and the plugins
    `disabled` left out, from carrying it out."""
    plan = Plan.read(path)
    reasons = [*_reasons(plan, config, enabled), *_left_out(plan, disabled)]
    if reasons:
        raise FuseError(f"fuse.plan={path}: this run cannot carry it out:\n  - " + "\n  - ".join(reasons))
    return plan


def overrides_of(plan: Plan, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys that a plan sets: verl's, and the keys under `fuse` that the user's `fuse` block `node` leaves
    open."""
    own = {}
    for key, value in plan.settings.items():
        block, name = key.split(".")
        there = node.get(block) or {}
        # A block that is none is refused where blocks are read.
        if isinstance(there, Mapping) and there.get(name, _UNSET[key]) in (_UNSET[key], value):
            own[f"{ADDED}fuse.{key}"] = value
    return {**plan.overrides, **own}


def apply_plan(config: DictConfig, overrides: Mapping[str, Any]) -> list[str]:
    """Set the plan's keys in place; return a line for each value that changed."""
    changed = []
    for name, value in overrides.items():
        key = name.removeprefix(ADDED)
        before = OmegaConf.select(config, key)
        if before != value:
            OmegaConf.update(config, key, value, force_add=name != key)
            changed.append(f"fuse.plan sets {key}={written(value)} (was {written(before)})")
    return changed


def _reasons(plan: Plan, config: DictConfig, enabled: Collection[str]) -> Iterator[str]:
    if plan.strategy is None:
        yield (
            "its calls have placements of their own, which needs weights to be moved between layouts: make a plan "
            "without --ideal"
        )
        return
    engine = _value(config, "actor_rollout_ref.actor.strategy")
    other_engine = str(engine).rstrip("2") != plan.strategy
    if other_engine:
        yield (
            f"it is for the engine {plan.strategy}, actor_rollout_ref.actor.strategy={engine}: compose with "
            f"model_engine={'megatron' if plan.strategy == 'megatron' else 'dp'}"
        )
    for key in _FIXED:
        if key in plan.overrides and _value(config, key) != plan.overrides[key]:
            yield f"it is for {key}={plan.overrides[key]}, this run has {_value(config, key)}"
    critic = _value(config, "critic.enable")
    critic = _value(config, "algorithm.adv_estimator") == "gae" if critic in (None, _ABSENT) else critic
    planned = any(call.call == "critic_train" for call in plan.calls)
    if critic != planned:
        yield (
            f"it is for a step {'with' if planned else 'without'} a critic, this run is "
            f"{'with' if critic else 'without'} one"
        )
    for feature, switch in zip(plan.features, plan.switches, strict=True):
        if switch not in enabled:
            yield f"it counts on {switch}: set fuse.{switch}.enabled=true, or plan without --feature {feature}"
    for key in _BINDING:
        wanted, there = plan.settings.get(key), _value(config, f"fuse.{key}")
        if wanted is not None and there not in (None, _ABSENT) and there != wanted:
            yield f"it is for fuse.{key}={wanted}, this run has {there}: leave the key out"
    # The configuration of another engine lacks all keys of the plan: one reason says so.
    for key in () if other_engine else plan.overrides:
        if not key.startswith(ADDED) and _value(config, key) is _ABSENT:
            yield f"it sets {key}, which this verl does not have"


def _left_out(plan: Plan, disabled: Collection[str]) -> Iterator[str]:
    for plugin in sorted({key.split(".")[0] for key in plan.settings} & set(disabled)):
        yield f"it sets keys of fuse.{plugin}, a plugin that fuse.disabled_plugins leaves out"


def _value(config: DictConfig, key: str) -> Any:
    """Return the value of a dotted key; _ABSENT if there is no such key, None for a missing or unresolvable value."""
    try:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent)
        if not isinstance(node, DictConfig) or name not in node:
            return _ABSENT
        return node[name]
    except OmegaConfBaseException:
        return None
