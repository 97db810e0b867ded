"""Which exact settings a composed configuration leaves to try, and why any other key is not tried.

Invariants (tests/unit/tune/test_candidates.py):
- a candidate has at least one value other than the configuration's, and every value keeps the rules of its setting;
- a key is either a candidate or has a reason.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_fuse.spec.block import nearest, written
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    MODEL,
    ROLLOUT,
    Get,
    getter,
    has_adapters,
    has_critic,
    has_key,
    has_reference,
    is_legacy,
    on_accelerators,
)
from verl_fuse.tune.outside import outside
from verl_fuse.tune.rules import BUDGET
from verl_fuse.tune.setting import Rule, Setting, Value
from verl_fuse.tune.table import BY_KEY, TABLE

Config = Mapping[str, Any] | DictConfig
_ROLES = {"actor": ACTOR, "reference": ACTOR, "critic": CRITIC}


@dataclass(frozen=True)
class Candidate:
    """A setting with its value in a configuration and the values to try; `present` are the keys of the configuration
    among those that a value sets."""

    setting: Setting
    current: Value
    values: tuple[Value, ...]
    present: frozenset[str]

    def changes(self, value: Value) -> dict[str, Value]:
        """Return the values by key that give the setting a value, with all that must change with it."""
        sets = {} if isinstance(value, list) else self.setting.sets.get(value, {})
        twins = (key for key in self.setting.together if key in self.present)
        return {self.setting.key: value, **dict.fromkeys(twins, value), **sets}

    def overrides(self, value: Value) -> tuple[str, ...]:
        """Return `changes` as overrides."""
        changed = self.changes(value)
        return tuple(f"{'' if key in self.present else '++'}{key}={_text(new)}" for key, new in changed.items())


def _text(value: Value) -> str:
    """Return a value as Hydra's command line takes it; all names in the table go without quotes."""
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list) else written(value)


def candidates(config: Config, *, experts: bool = False) -> tuple[Candidate, ...]:
    """Return what may be tried from this configuration on, in the table's order; `experts`: the model is a mixture of
    experts. Values of some keys depend on others: ask again after a change, and choose one of the values then given
    for a key whose value is no longer among them."""
    config = _composed(config)
    get = getter(config)
    return tuple(_candidate(config, get, setting) for setting in TABLE if _idle(config, setting, experts) is None)


def too_small(candidate: Candidate) -> int | None:
    """Return the least that a budget of tokens needs, the longest sequence, where its value is below that."""
    least, current = next(iter(candidate.values), None), candidate.current
    if candidate.setting.values is not BUDGET or not isinstance(least, int) or not isinstance(current, int):
        return None
    return least if current < least else None


def holds_longest(candidate: Candidate) -> bool:
    """Tell whether a setting is a budget of tokens that holds the longest sequence."""
    budget = candidate.setting.values is BUDGET and isinstance(candidate.current, int)
    return budget and too_small(candidate) is None


def not_tried(key: str, config: Config, *, experts: bool = False) -> str | None:
    """Return why a key is not among the candidates of a configuration; None where it is."""
    config = _composed(config)
    if key in BY_KEY:
        return _idle(config, BY_KEY[key], experts)
    if leader := next((setting.key for setting in TABLE if key in setting.together), None):
        return f"it is set with {leader}"
    if not has_key(config, key):
        return f"there is no such key{nearest(key, (*BY_KEY, *leaves(config)))}"
    return outside(key) or "not in the table: nobody has shown that other values train the same"


def _composed(config: Config) -> DictConfig:
    return config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))


def _candidate(config: DictConfig, get: Get, setting: Setting) -> Candidate:
    named = {setting.key, *setting.together, *(key for keys in setting.sets.values() for key in keys)}
    present = frozenset(key for key in named if has_key(config, key))
    return Candidate(setting, _current(get, setting), _values(get, setting), present)


def _idle(config: DictConfig, setting: Setting, experts: bool) -> str | None:
    """Return why a setting of the table has nothing to try in this configuration."""
    return next(_reasons(config, setting, experts), None)


def _reasons(config: DictConfig, setting: Setting, experts: bool) -> Iterator[str]:
    get = getter(config)
    if is_legacy(config):
        yield "trainer.use_v1=false: the trainer before V1 reads other keys"
    if setting.role == "critic" and not has_critic(get):
        yield "there is no critic"
    if setting.role == "reference" and (not has_reference(get) or has_adapters(get)):
        yield "there is no reference of its own"
    engine = f"{_ROLES[setting.role]}.strategy" if setting.role in _ROLES else f"{ROLLOUT}.name"
    if get(engine) not in setting.engines:
        yield f"{engine}={written(get(engine))}: needs {_either(setting.engines)}"
    if "accelerator" in setting.wants and not on_accelerators(get):
        yield "trainer.device=cpu: needs an accelerator"
    if "adapters" in setting.wants and not has_adapters(get):
        yield f"{MODEL}.lora_rank={written(get(f'{MODEL}.lora_rank'))}: needs adapters"
    if "experts" in setting.wants and not experts:
        yield "the model has no experts"
    for key, allowed in setting.needs.items():
        if (value := _current(get, BY_KEY[key]) if key in BY_KEY else get(key)) not in allowed:
            yield f"{key}={written(value)}: needs {_either(allowed)}"
    current, values = _current(get, setting), _values(get, setting)
    if all(value == current for value in values):
        rule = setting.values.says if isinstance(setting.values, Rule) else _either(setting.values)
        yield f"{setting.key}={written(current)}: there is no other value here; needs {rule}"


def _either(values: Collection[Value]) -> str:
    return " or ".join(map(written, values))


def _current(get: Get, setting: Setting) -> Value:
    value = get(setting.key)
    if value is None and setting.added:
        return setting.default
    return OmegaConf.to_container(value) if isinstance(value, ListConfig) else value  # type: ignore[return-value]


def _values(get: Get, setting: Setting) -> tuple[Value, ...]:
    return setting.values.tried(get, setting.key) if isinstance(setting.values, Rule) else setting.values


def leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the configuration that is no block, or an empty one."""
    for name in config:
        node = config._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none() and node:
            yield from leaves(node, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
