"""Reads `fuse.realloc.schedule`: in shards of how many ranks each model is trained, and from which step on.

Invariants (tests/unit/realloc/test_layout_schedule.py):
- a step without a value of its own keeps the value of an earlier entry; before the first entry the configuration holds;
- a plan file in place of a block must differ from the configuration in nothing else (refusals.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.spec.composed import Get
from verl_fuse.spec.plan import Plan

KEY = "fuse.realloc.schedule"
FSDP_SIZE = {"actor": "actor_rollout_ref.actor.fsdp_config.fsdp_size", "critic": "critic.fsdp.fsdp_size"}


@dataclass(frozen=True)
class LayoutSchedule:
    """Entries of (first step, `fsdp_size` by model), in order of steps; the first entry has the configuration's values,
    for models that later entries name."""

    entries: tuple[tuple[int, Mapping[str, int]], ...]

    @classmethod
    def read(cls, get: Get) -> "LayoutSchedule":
        """Read the schedule from a configuration that `refusals` has nothing against."""
        later = sorted((step, sizes_of(value)) for step, value in scheduled(get).items())
        named = {model for _, sizes in later for model in sizes}
        return cls(((1, {model: get(key) for model, key in FSDP_SIZE.items() if model in named}), *later))

    def wanted(self, step: int) -> Mapping[str, int]:
        """Return the `fsdp_size` of each model at a step."""
        return {model: size for first, sizes in self.entries if first <= step for model, size in sizes.items()}


def scheduled(get: Get) -> Mapping[Any, Any]:
    """Return the block as written; empty if there is none."""
    block = get(KEY)
    return OmegaConf.to_container(block) if isinstance(block, DictConfig) else block or {}  # type: ignore[return-value]


def overrides_of(path: str) -> dict[str, Any]:
    """Return the keys of verl's configuration that a plan file sets."""
    # ++ stands before keys that verl's YAML lacks.
    return {name.removeprefix("++"): value for name, value in Plan.read(Path(path)).overrides.items()}


def sizes_of(value: Any) -> dict[str, int]:
    """Return the `fsdp_size` by model of an entry."""
    if isinstance(value, str):
        overrides = overrides_of(value)
        return {model: overrides[key] for model, key in FSDP_SIZE.items() if key in overrides}
    return {model: block["fsdp_size"] for model, block in value.items()}
