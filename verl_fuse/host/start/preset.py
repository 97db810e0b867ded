"""Chooses the features that `fuse.preset` switches on: the features that pay for this algorithm, engine and device, by
their records. Imports neither verl nor ray.

Invariants (tests/unit/host/test_preset.py):
- only keys that are null are chosen: a key that the user sets keeps its value;
- a feature with any refusal stays off, with every refusal; a configuration refused without the preset is refused with
it;
- of two features that exclude each other, the one with the larger measured gain is chosen;
- a feature that has nothing to do in this run, beside the others, or was measured to be slower on its devices, stays
off; switched on by its own key it runs, and the measurement is told;
- with the keys that unlock a feature the preset switches it on, and nothing else is refused than before.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import listed
from verl_fuse.feature import Feature, PresetName
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import copied, getter
from verl_fuse.spec.step import Refusal

# A problem is a refusal, or a text.
Problems = Callable[[DictConfig], Sequence[object]]
# Values of keys below `fuse`.
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A preset's choice about a feature: the keys of `fuse` that switch it on, or every reason to leave it off."""

    preset: PresetName
    feature: Feature
    keys: Keys
    reasons: tuple[object, ...] = ()

    def __str__(self) -> str:
        without = f"without {self.feature.switch}: {listed(self.reasons)}"
        return f"fuse.preset={self.preset}: {without if self.reasons else _written(self.keys)}"


def choose(
    config: DictConfig, name: PresetName, features: Collection[Feature], problems: Problems
) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Return (the keys of `fuse` that the preset sets in `config`, its choice about each feature); `problems` finds
    the refusals of a configuration."""
    get = getter(config)
    wanted = {
        feature.name: {key: value for key, value in keys.items() if get(f"fuse.{key}") is None}
        for feature in features
        if name in feature.presets and get(f"fuse.{feature.switch}") is None
        for keys in [{**feature.keys, **feature.presets[name]}]
    }
    tried = [feature for feature in features if feature.name in wanted]
    if not tried:
        return {}, ()
    work = copied(config)
    left_out: dict[str, tuple[object, ...]] = {}
    while True:
        chosen, why_not = _chosen([one for one in tried if one.name not in left_out], wanted, work, problems)
        # A feature that was chosen later may have taken the work of another one, which kept others out.
        idle = {one.name: _idle(one, chosen, work) for one in tried if one.name in chosen}
        taken = next(((one, why) for one, why in idle.items() if why), None)
        if taken is None:
            break
        left_out[taken[0]] = (taken[1],)
    left_out |= why_not
    return _merged(chosen), tuple(
        Choice(name, one, chosen.get(one.name, {}), left_out.get(one.name, ())) for one in tried
    )


def unlocked(config: DictConfig, choice: Choice, features: Collection[Feature], problems: Problems) -> dict[str, Any]:
    """Return keys of verl's configuration, with values, with which the preset switches on the feature that it leaves
    off; none where its reasons name no values, or the values are refused in their turn."""
    get, wanted = getter(config), dict[str, Any]()
    while choice.reasons:
        lifted = [reason.unlock if isinstance(reason, Refusal) else {} for reason in choice.reasons]
        more = {key: value for unlock in lifted for key, value in unlock.items()}
        # Another feature of the preset is not given up for this one.
        given_up = any(key.startswith("fuse.") and get(key) is None for key in more)
        if not all(lifted) or given_up or more.items() <= wanted.items():
            return {}
        wanted |= more
        work = copied(config)
        for key, value in wanted.items():
            OmegaConf.update(work, key, value, force_add=True)
        if not {*map(str, problems(config))}.issuperset(map(str, problems(work))):
            return {}
        _, choices = choose(work, choice.preset, features, problems)
        choice = next(one for one in choices if one.feature.name == choice.feature.name)
    return wanted


def _chosen(
    features: Iterable[Feature], wanted: Mapping[str, Keys], work: DictConfig, problems: Problems
) -> tuple[dict[str, Keys], dict[str, tuple[object, ...]]]:
    """Return the keys of the features to switch on, the largest measured gain first, and the reasons against the
    others."""
    refused = {str(problem) for problem in problems(work)}
    chosen: dict[str, Keys] = {}
    why_not: dict[str, tuple[object, ...]] = {}
    for feature in sorted(features, key=lambda feature: -feature.measured):
        keys, before = wanted[feature.name], _merged(chosen)
        idle = _idle(feature, chosen, work)
        why: list[object] = [idle] if idle else []
        if not why:
            others = (key for key in keys if before.get(key, keys[key]) != keys[key])
            why = [f"fuse.{key}={written(before[key])} is chosen" for key in others]
        if not why:
            with _with_keys(work, {**before, **keys}):
                why = [problem for problem in problems(work) if str(problem) not in refused]
        if not why and (slower := feature.slower(getter(work))):
            why = [f"{slower}; {_written(keys)} switches it on all the same"]
        if why:
            why_not[feature.name] = tuple(why)
        else:
            chosen[feature.name] = keys
    return chosen, why_not


def _idle(feature: Feature, chosen: Mapping[str, Keys], work: DictConfig) -> str | None:
    """Return the reason for which the feature has nothing to do beside the others that are chosen."""
    with _with_keys(work, _merged({name: keys for name, keys in chosen.items() if name != feature.name})):
        return feature.idle(getter(work))


def slower_features(config: DictConfig, features: Iterable[Feature]) -> Iterator[str]:
    """Yield the measurement of each feature that is on though it was measured to be slower on these devices."""
    get = getter(config)
    for feature in features:
        if get(f"fuse.{feature.switch}") is True and (slower := feature.slower(get)):
            yield f"fuse.{feature.switch}=true: {slower}"


def with_keys(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a copy of `config` with these keys of `fuse`."""
    changed = copied(config)
    for key, value in values.items():
        OmegaConf.update(changed, f"fuse.{key}", value, force_add=True)
    return changed


@contextmanager
def _with_keys(config: DictConfig, values: Keys) -> Iterator[None]:
    """Let `config` have these keys of `fuse` within the block: a copy of it takes longer than all checks."""
    before = {key: getter(config)(f"fuse.{key}") for key in values}
    try:
        for key, value in values.items():
            OmegaConf.update(config, f"fuse.{key}", value, force_add=True)
        yield
    finally:
        for key, value in before.items():
            OmegaConf.update(config, f"fuse.{key}", value, force_add=True)


def _merged(chosen: Mapping[str, Keys]) -> dict[str, Any]:
    return {key: value for keys in chosen.values() for key, value in keys.items()}


def _written(values: Mapping[str, Any]) -> str:
    return " ".join(f"fuse.{key}={written(value)}" for key, value in values.items())
