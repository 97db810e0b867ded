"""A plan file (`fuse.plan`) against the configuration it is to be applied to. Imports neither verl nor ray.

Invariants (tests/unit/host/test_applied_plan.py):
- a plan that this run could carry out only in part is refused, with every reason;
- what features demand of a run is asked of the configuration with the plan in it;
- the plan's keys win over the configuration's, except a migration threshold that the user has set.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.errors import FuseError
from verl_fuse.spec.plan import Plan, Setting

# What decides where devices are; a run is started on them before the plan is read.
_FIXED = ("trainer.nnodes", "trainer.n_gpus_per_node")
# Before a key that verl reads but its YAML lacks, as on Hydra's command line.
ADDED = "++"
_ABSENT = object()


def checked_plan(path: Path, config: DictConfig, enabled: Collection[str]) -> Plan:
    """Read a plan; a FuseError lists everything that keeps this run, with the features
    `enabled`, from carrying it out."""
    plan = Plan.read(path)
    reasons = list(_reasons(plan, config, enabled))
    if reasons:
        raise FuseError(f"fuse.plan={path}: this run cannot carry it out:\n  - " + "\n  - ".join(reasons))
    return plan


def apply_plan(config: DictConfig, overrides: Mapping[str, Setting]) -> list[str]:
    """Set the plan's keys in place; returns a line for each value that was another one before."""
    changed = []
    for name, value in overrides.items():
        key = name.removeprefix(ADDED)
        before = OmegaConf.select(config, key)
        if before != value:
            OmegaConf.update(config, key, value, force_add=name != key)
            changed.append(f"fuse.plan sets {key}={value} (was {before})")
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
    for feature in plan.features:
        if feature not in enabled:
            yield f"it counts on {feature}: set fuse.{feature}.enabled=true, or plan without --feature {feature}"
    # The configuration of another engine lacks all keys of the plan's: one reason says it.
    for key in () if other_engine else plan.overrides:
        if not key.startswith(ADDED) and _value(config, key) is _ABSENT:
            yield f"it sets {key}, which this verl does not have"


def _value(config: DictConfig, key: str) -> Any:
    """The value of a dotted key; _ABSENT if there is none, None for a missing or unresolvable one."""
    try:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent)
        if not isinstance(node, DictConfig) or name not in node:
            return _ABSENT
        return node[name]
    except OmegaConfBaseException:
        return None
