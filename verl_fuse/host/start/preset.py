"""Chooses the features that `fuse.preset` switches on: the features that pay for this algorithm, engine and device, by
their records. Imports neither verl nor ray.

Invariants (tests/unit/host/test_preset.py):
- only keys that are null are chosen: a key that the user sets keeps its value;
- a feature with any refusal stays off, with every refusal; a configuration refused without the preset is refused with
it;
- of two features that exclude each other, the one with the larger measured gain is chosen;
- a feature that has nothing to do in this run, beside the others, or was measured to be slower on its devices, stays
off; switched on by its own key it runs, and the measurement is told.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import listed
from verl_fuse.feature import Feature, PresetName
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import getter

Problems = Callable[[DictConfig], Sequence[str]]


def choose(
    config: DictConfig, name: PresetName, features: Iterable[Feature], problems: Problems
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (the keys of `fuse` that the preset sets in `config`, a line on each feature); `problems` finds the
    refusals of a configuration."""
    tried = [feature for feature in features if name in feature.presets]
    open_ = [feature for feature in tried if getter(config)(f"fuse.{feature.switch}") is None]
    refused = set(problems(config)) if open_ else set()
    chosen: dict[str, Mapping[str, Any]] = {}
    left_out: dict[str, str] = {}
    for feature in sorted(open_, key=lambda feature: -feature.measured):
        wanted = _unset(config, {**feature.keys, **feature.presets[name]})
        beside = _beside(config, chosen, feature)
        why = feature.idle(getter(beside))
        if why is None:
            why = listed([problem for problem in problems(with_keys(beside, wanted)) if problem not in refused])
        if not why and (slower := feature.slower(getter(config))):
            why = f"{slower}; {_written(wanted)} switches it on all the same"
        if why:
            left_out[feature.name] = why
        else:
            chosen[feature.name] = wanted
    # A feature that was chosen later may have taken its work.
    for feature in open_:
        if feature.name in chosen and (why := feature.idle(getter(_beside(config, chosen, feature)))):
            del chosen[feature.name]
            left_out[feature.name] = why
    lines = (
        f"fuse.preset={name}: "
        + (
            _written(chosen[feature.name])
            if feature.name in chosen
            else f"without {feature.switch}: {left_out[feature.name]}"
        )
        for feature in open_
    )
    return dict(_items(chosen)), tuple(lines)


def slower_features(config: DictConfig, features: Iterable[Feature]) -> Iterator[str]:
    """Yield the measurement of each feature that is on though it was measured to be slower on these devices."""
    get = getter(config)
    for feature in features:
        if get(f"fuse.{feature.switch}") is True and (slower := feature.slower(get)):
            yield f"fuse.{feature.switch}=true: {slower}"


def with_keys(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a copy of `config` with these keys of `fuse`."""
    changed = deepcopy(config)
    for key, value in values.items():
        OmegaConf.update(changed, f"fuse.{key}", value, force_add=True)
    return changed


def _beside(config: DictConfig, chosen: Mapping[str, Mapping[str, Any]], feature: Feature) -> DictConfig:
    """Return the configuration with all that is chosen but this feature."""
    return with_keys(config, dict(_items({name: keys for name, keys in chosen.items() if name != feature.name})))


def _items(chosen: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    return (item for keys in chosen.values() for item in keys.items())


def _unset(config: DictConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    get = getter(config)
    return {key: value for key, value in keys.items() if get(f"fuse.{key}") is None}


def _written(values: Mapping[str, Any]) -> str:
    return " ".join(f"fuse.{key}={written(value)}" for key, value in values.items())
