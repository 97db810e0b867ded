"""Chooses the features that `fuse.preset` switches on: the features that pay for this algorithm, engine and device.
Imports neither verl nor ray.

Invariants (tests/unit/host/test_preset.py):
- only keys that are null are chosen: a key that the user sets keeps its value;
- a feature with any refusal stays off, with every refusal; a configuration refused without the preset is refused with
it;
- a feature that has nothing to do in this run, or was measured to be slower on its devices, stays off; switched on by
its own key it runs, and the measurement is told.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_fuse.cost.drafter import FIGURES
from verl_fuse.errors import listed
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import ROLLOUT, Get, getter, has_critic, has_reference, on_accelerators

PresetName = Literal["observe", "safe", "fast"]
Problems = Callable[[DictConfig], Sequence[str]]


@dataclass(frozen=True)
class Candidate:
    """A feature: the keys of `fuse` that switch it on, of which the first is its switch; `idle` returns the reason why
    the feature has nothing to do in a run, and `slower` the measurement by which it makes a run slower, or None."""

    keys: Mapping[str, Any]
    idle: Callable[[Get], str | None]
    slower: Callable[[Get], str | None] = lambda _get: None

    @property
    def switch(self) -> str:
        return next(iter(self.keys))


def _without_a_critic(get: Get) -> str | None:
    return "there is no critic" if not has_critic(get) else None


def _with_a_critic(get: Get) -> str | None:
    return "a critic's advantages are hardly ever 0" if has_critic(get) else None


def _replicas(get: Get) -> int:
    devices = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    of_one = 1
    for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        of_one *= get(f"{ROLLOUT}.{size}") or 1
    return devices // of_one


def _one_replica(get: Get) -> str | None:
    return "there is one rollout replica" if _replicas(get) < 2 else None


def _nothing_to_infer(get: Get) -> str | None:
    bypass = get("algorithm.rollout_correction.bypass_mode")
    old_log_probs = not bypass and not get("fuse.update.skip_old_log_prob")
    values = has_critic(get) and not get("fuse.update.skip_values")
    if not (old_log_probs or has_reference(get) or values):
        return "there is neither an old log-prob pass, nor a reference, nor a pass for values"
    return _one_replica(get)


def _one_sample(get: Get) -> str | None:
    return "a prompt has one sample (rollout.n)" if (get(f"{ROLLOUT}.n") or 1) < 2 else _one_replica(get)


def _always(_get: Get) -> str | None:
    return None


def _slower_with_drafts(get: Get) -> str | None:
    return FIGURES if on_accelerators(get) else None


ZERO_GRADIENT = Candidate({"update.skip_zero_gradient": True}, _with_a_critic)
OWN_LOG_PROBS = Candidate({"update.skip_old_log_prob": True}, _always)
CRITIC_FIRST = Candidate({"update.skip_values": True}, _without_a_critic)
COMPUTED = {"update.metrics": "computed"}
ROUTING = Candidate({"elastic.enabled": True}, _one_sample)
# In this order: a later feature may have nothing to do beside an earlier one, or be refused beside it.
PRESETS: Mapping[PresetName, Sequence[Candidate]] = {
    "observe": (),
    "safe": (ZERO_GRADIENT, OWN_LOG_PROBS, CRITIC_FIRST, ROUTING),
    "fast": (
        Candidate({"pipeline.enabled": True}, _without_a_critic),
        Candidate({**ZERO_GRADIENT.keys, **COMPUTED}, ZERO_GRADIENT.idle),
        Candidate({**OWN_LOG_PROBS.keys, **COMPUTED}, OWN_LOG_PROBS.idle),
        CRITIC_FIRST,
        Candidate({"speculation.enabled": True}, _always, _slower_with_drafts),
        Candidate(
            {"interstage.enabled": True, "interstage.layout": "slices", "interstage.migration_threshold": "auto"},
            _nothing_to_infer,
        ),
        ROUTING,
    ),
}


def choose(config: DictConfig, name: PresetName, problems: Problems) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (the keys of `fuse` that the preset sets in `config`, a line on each feature); `problems` finds the
    refusals of a configuration."""
    chosen: dict[str, Any] = {}
    lines: list[str] = []
    refused = set(problems(config)) if PRESETS[name] else set()
    for candidate in PRESETS[name]:
        get = getter(config)
        if get(f"fuse.{candidate.switch}") is not None:
            continue
        wanted = {key: value for key, value in candidate.keys.items() if get(f"fuse.{key}") is None}
        why = candidate.idle(get)
        tried = with_keys(config, wanted)
        if why is None:
            why = listed([problem for problem in problems(tried) if problem not in refused])
        if not why and (slower := candidate.slower(get)):
            why = f"{slower}; {_written(wanted)} switches it on all the same"
        if not why:
            chosen, config = chosen | wanted, tried
        lines.append(f"fuse.preset={name}: " + (f"without {candidate.switch}: {why}" if why else _written(wanted)))
    return chosen, tuple(lines)


def slower_features(config: DictConfig) -> Iterator[str]:
    """Yield the measurement of each feature that is on though a preset leaves it out as slower on these devices."""
    get = getter(config)
    for candidate in PRESETS["fast"]:
        if get(f"fuse.{candidate.switch}") and (slower := candidate.slower(get)):
            yield f"fuse.{candidate.switch}=true: {slower}"


def with_keys(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a copy of `config` with these keys of `fuse`."""
    changed = deepcopy(config)
    for key, value in values.items():
        OmegaConf.update(changed, f"fuse.{key}", value, force_add=True)
    return changed


def _written(values: Mapping[str, Any]) -> str:
    return " ".join(f"fuse.{key}={written(value)}" for key, value in values.items())
