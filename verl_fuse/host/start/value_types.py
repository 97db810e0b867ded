"""Checks that numbers and truth values of verl's configuration are such, before a run starts: verl converts nothing,
and meets a text minutes later.

The type of a key is the annotation in the dataclass of verl that its block names (`_target_`); in the blocks `trainer`
and `data`, which have none, the type of the default in verl's YAML. Both are read from source. A key of another type,
such as text, may have any value.

Invariants (tests/unit/host/test_value_types.py):
- whole numbers, floats and truth values stand for each other, but keys that verl counts with need whole numbers;
- null is left to verl, but for keys that verl computes with in every run;
- text that OmegaConf reads as a number is left to verl in a block with a dataclass, and text that it reads as true
  where a truth value is needed; other text is refused there although stock verl trains: verl takes it for true, `off`
  too;
- empty text, an unset variable of a script, is left to verl where verl takes it for false or for null;
- blocks of models and trainer modes that the run lacks, and blocks that are not `enable`d, may have any value;
- a value that does not resolve here is left to the run.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from omegaconf import BooleanNode, DictConfig, FloatNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.host.start.compat.source import NotFound, SourceTree, statements
from verl_fuse.host.upstream.targets import DATA_YAML, PPO_YAML
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    REFERENCE,
    ROLLOUT,
    getter,
    has_critic,
    has_reference,
    is_legacy,
    is_validation_only,
)
from verl_fuse.spec.step import Refusal

Kind = Literal["number", "truth"]

# verl counts with these numbers, or cuts lists by them.
COUNTS = frozenset(
    {
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "data.train_batch_size",
        "data.dataloader_num_workers",
        f"{ROLLOUT}.n",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{CRITIC}.ppo_mini_batch_size",
    }
)
# verl compares or multiplies these numbers in every run, without a look whether they are null.
_OF_STEPS = frozenset({"trainer.save_freq", "trainer.test_freq", "trainer.critic_warmup"})
NEVER_NULL = COUNTS | _OF_STEPS | {"trainer.total_epochs"}
# verl takes another value where these are false.
_OR_ANOTHER = frozenset({"data.gen_batch_size", "data.val_batch_size"})
# verl sets them itself.
_OVERWRITTEN = frozenset(f"{model}.optim.total_training_steps" for model in (ACTOR, CRITIC))
# Their default in verl's YAML is null.
_NULL_BY_DEFAULT: Mapping[str, Mapping[str, Kind]] = {
    "trainer": {"total_training_steps": "number"},
    "data": {"gen_batch_size": "number", "val_batch_size": "number", "seed": "number"},
}
_KINDS: Mapping[str, Kind] = {"int": "number", "float": "number", "bool": "truth"}


def type_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse values that are no number, or no truth value, where verl needs one; a reference to such a value is not
    refused again."""
    if is_legacy(config):
        return
    found = list(_typed(config, "", _other_blocks(config)))
    ends_before = _OF_STEPS if is_validation_only(getter(config)) else frozenset()
    refused: list[Any] = []
    for references in (False, True):
        for block, path, name, kind in found:
            if OmegaConf.is_interpolation(block, name) is not references:
                continue
            try:
                value = block[name]
            except OmegaConfBaseException:
                continue
            if (key := f"{path}{name}") in ends_before | _OVERWRITTEN:
                continue
            needs = _needs(key, kind, value, has_dataclass="_target_" in block)
            if needs and not (references and value in refused):
                refused.append(value)
                yield Refusal(key, value, f"needs {needs}")


def _needs(key: str, kind: Kind, value: Any, *, has_dataclass: bool) -> str | None:
    """Return what the key needs; None where it has that."""
    if value is None:
        return ("a whole number" if key in COUNTS else "a number") if key in NEVER_NULL else None
    if key in COUNTS:
        return None if isinstance(value, int) else "a whole number"
    if isinstance(value, int | float) or (value == "" and (kind == "truth" or key in _OR_ANOTHER)):
        return None
    if kind == "truth":
        return None if _read(BooleanNode, value) is True else "true or false (verl takes this for true)"
    return None if has_dataclass and _read(FloatNode, value) is not None else "a number"


def _read(node: type, value: Any) -> Any:
    """Return text as OmegaConf reads it for such a node; None for what it refuses."""
    try:
        return node(value)._value() if isinstance(value, str) else None
    except OmegaConfBaseException:
        return None


def _other_blocks(config: DictConfig) -> set[str]:
    """Return the blocks of models and trainer modes that this run lacks."""
    get = getter(config)
    modes = {f"trainer.v1.{name}" for name in ("colocate_async", "separate_async")}
    models = {CRITIC: has_critic(get), REFERENCE: has_reference(get)}
    return modes - {f"trainer.v1.{get('trainer.v1.trainer_mode')}"} | {key for key, used in models.items() if not used}


def _typed(block: DictConfig, path: str, others: set[str]) -> Iterator[tuple[DictConfig, str, str, Kind]]:
    """Yield (block, its path with a dot at the end, name, kind) of the numbers and truth values in `block`."""
    if path.removesuffix(".") in others or any(_value(block, name) is False for name in ("enable", "enabled")):
        return
    target = _value(block, "_target_")
    kinds = _of_dataclass(target) if isinstance(target, str) else _of_yaml(path)
    for key in block:
        # A user's own block may have keys that are no text.
        if (name := str(key)) in kinds:
            yield block, path, name, kinds[name]
        node = block._get_node(key)
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation() or node._is_missing()):
            yield from _typed(node, f"{path}{name}.", others)


def _value(block: DictConfig, name: str) -> Any:
    """Return the value of a key that is written out in the block; None for any other."""
    return block[name] if name in block and not OmegaConf.is_interpolation(block, name) else None


@cache
def _verl() -> SourceTree:
    return SourceTree.installed("verl")


@cache
def _of_yaml(path: str) -> Mapping[str, Kind]:
    """Return the kinds of the keys of a block that has no dataclass."""
    if path not in ("trainer.", "data.") or "verl" not in _verl().roots:
        return {}
    defaults = _verl().yaml(PPO_YAML)["trainer"] if path == "trainer." else _verl().yaml(DATA_YAML)
    kinds: dict[str, Kind] = {}
    for name, value in defaults.items():
        if kind := _KINDS.get(type(value).__name__):
            kinds[name] = kind
    return {**kinds, **_NULL_BY_DEFAULT[path.removesuffix(".")]}


@cache
def _of_dataclass(target: str) -> Mapping[str, Kind]:
    """Return the kinds of the fields of a class of verl; none for a class of somebody else."""
    module, _, name = target.rpartition(".")
    try:
        owners = list(_verl().bases(_verl().find(f"{module}:{name}")))
    except NotFound:
        return {}
    annotations = {
        node.target.id: node.annotation
        for owner in reversed(owners)
        for node in statements(getattr(owner.node, "body", []))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: kind for name, node in annotations.items() if (kind := _kind(set(_arms(node))))}


def _kind(arms: set[str]) -> Kind | None:
    """Return the kind of a union of these types; None where one of them is no number and no truth value."""
    kinds = {_KINDS.get(arm) for arm in arms - {"None"}}
    if not kinds or None in kinds:
        return None
    return "number" if "number" in kinds else "truth"


def _arms(annotation: ast.expr) -> Iterator[str]:
    """Yield the types of an annotation such as `int`, `Optional[int]` or `int | None`."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from _arms(left)
            yield from _arms(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _arms(inner)
        case _:
            yield ast.unparse(annotation)
