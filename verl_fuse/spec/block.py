"""Reads a block of configuration into a frozen dataclass.

Invariants (tests/unit/spec/test_block.py):
- a key the dataclass does not have is refused, with the nearest valid key;
- a value of another type is refused, never converted, except int -> float;
- a faulty item of a list of blocks, of lists or of numbers is named by its place;
- a key without a default that is not there is named;
- a bound or choice given in the field's metadata is enforced; the message names key, value and the allowed values;
- all problems of a block are found at once;
- truths and null stand in messages as YAML writes them, and text in quotes where it is a faulty value;
- a key set in a block that is not `enabled`, or beside another key that makes it idle, is found, but not refused: the
switch alone turns a feature off and on.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from verl_fuse.errors import FuseError

T = TypeVar("T")

# Longer waits than threads can be told of (threading.TIMEOUT_MAX) are refused; this is 30 years.
LONGEST_WAIT = 1e9
# Characters of an unknown key in a message.
MOST_SHOWN = 80
# Metadata of a field that counts even where its block is not `enabled`.
COUNTS_ALWAYS = {"always": True}


def bounded(minimum: float | None = None, maximum: float | None = None) -> dict[str, Any]:
    """Return metadata for a numeric dataclass field: inclusive bounds."""
    return {"minimum": minimum, "maximum": maximum}


def waiting() -> dict[str, Any]:
    """Return metadata for a field of seconds that a wait may take."""
    return bounded(1.0, LONGEST_WAIT)


def left_to_preset(otherwise: Any) -> dict[str, Any]:
    """Return metadata of a field whose None means: the choice of `fuse.preset`, or `otherwise` where the preset chooses
    nothing."""
    return {"otherwise": otherwise}


def undecided(block: type) -> dict[str, Any]:
    """Return the fields of `block` (a dataclass) that may be left to `fuse.preset`, with their values where the preset
    chooses nothing."""
    fields = dataclasses.fields(block)  # type: ignore[arg-type]
    return {field.name: field.metadata["otherwise"] for field in fields if "otherwise" in field.metadata}


def written(value: Any) -> str:
    """Return a value as a user writes it in YAML: true, false, null, text without quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def key_of(override: str) -> str:
    """Return the key that an override (KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY) changes, adds or removes."""
    return override.lstrip("+~").partition("=")[0]


def quoted(value: Any) -> str:
    """Return a faulty value for a message: as `written`, text in quotes."""
    return repr(value) if isinstance(value, str) else written(value)


def check_counts(where: str, block: object, names: Iterable[str]) -> None:
    """Refuse a block in which one of these fields is no whole number >= 1."""
    for name in names:
        value = getattr(block, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FuseError(f"{where}: {name}={quoted(value)}; needs a whole number >= 1")


def read_block(block: type[T], data: Mapping[str, Any] | None, where: str) -> T:
    """Build `block` (a dataclass) from `data`; `where` is the block's dotted name in the
    configuration, used in messages."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise FuseError(f"{where}={quoted(data)}: needs a block with keys {_names(block)}")
    hints = typing.get_type_hints(block)
    fields = {field.name: field for field in dataclasses.fields(block)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    problems: list[Any] = []
    for key, value in data.items():
        if key not in fields:
            # A file that is no block, such as a script, may be read as one key.
            line = " ".join(str(key).split())
            name = line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."
            problems.append(f"{where}.{name}: unknown key{nearest(name, fields)}; allowed: {_names(block)}")
            continue
        try:
            values[key] = _checked(value, hints[key], fields[key].metadata, f"{where}.{key}")
        except FuseError as error:
            problems.extend(error.args)
    missing = [
        name
        for name, field in fields.items()
        if name not in data and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        problems.append(f"{where}: missing {', '.join(missing)}")
    if problems:
        raise FuseError(*problems)
    return block(**values)


def idle_while(**values: Any) -> dict[str, Any]:
    """Return metadata of a field that no code reads while all these fields of its block have these values."""
    return {"idle_while": values}


def without_effect(block: Any) -> dict[tuple[tuple[str, Any], ...], dict[str, Any]]:
    """Return the fields of `block` (a dataclass) that differ from the defaults though no code reads them, by the
    fields, and their values, that make them idle."""
    defaults = type(block)()
    found: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        if value in (getattr(defaults, field.name), field.metadata.get("otherwise")) or field.metadata.get("always"):
            continue
        off = {"enabled": False} if not getattr(block, "enabled", True) else field.metadata.get("idle_while")
        if off and all(getattr(block, name) == other for name, other in off.items()):
            found.setdefault(tuple(off.items()), {})[field.name] = value
    return found


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = _arm(value, hint)
    if dataclasses.is_dataclass(hint):
        return read_block(typing.cast(type, hint), value, where)
    if (item := _item(hint)) is not None:
        if not isinstance(value, list | tuple):
            raise FuseError(f"{where}={quoted(value)}: needs a list")
        found: list[Any] = []
        problems: list[Any] = []
        for index, one in enumerate(value):
            try:
                found.append(_checked(one, item, {}, f"{where}[{index}]"))
            except FuseError as error:
                problems.extend(error.args)
        if problems:
            raise FuseError(*problems)
        return tuple(found)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not _fits(value, hint):
        raise FuseError(f"{where}={quoted(value)}: needs {_describe(hint)}")
    if isinstance(value, list):
        value = tuple(value)
    _check_bounds(value, metadata.get("minimum"), metadata.get("maximum"), where)
    return value


def _item(hint: Any) -> Any:
    """Return the type of the items of a list that are checked one by one; None for any other type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or args[-1] is not Ellipsis:
        return None
    return args[0] if dataclasses.is_dataclass(args[0]) or typing.get_origin(args[0]) is tuple else None


def _arm(value: Any, union: Any) -> Any:
    """Return the member of a union that this value is meant for; the union itself if no member fits."""
    arms = typing.get_args(union)
    nested = [arm for arm in arms if dataclasses.is_dataclass(arm) and isinstance(value, Mapping)]
    numbers = [arm for arm in arms if arm is float and isinstance(value, int) and not isinstance(value, bool)]
    fitting = [arm for arm in arms if _fits(value, arm)]
    return next(iter([*nested, *fitting, *numbers]), union)


def _check_bounds(value: Any, minimum: float | None, maximum: float | None, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = minimum is not None and value < minimum, maximum is not None and value > maximum
    finite = isinstance(value, int) or math.isfinite(value)
    if low or high or not finite:
        limits = [f">= {minimum}"] * (minimum is not None) + [f"<= {maximum}"] * (maximum is not None)
        raise FuseError(
            f"{where}={quoted(value)}: needs {' and '.join([*limits, *['a finite number'] * (not finite)])}"
        )


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, args[1]) for item in value.values())
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"a list of {len(args)}: {', '.join(map(_describe, args))}"
    if origin in (tuple, list):
        return f"a list of {args[0].__name__}"
    if origin is Mapping:
        return f"names, each with {_describe(args[1])}"
    if dataclasses.is_dataclass(hint):
        return f"a block with {_names(typing.cast(type, hint))}"
    names = {
        Any: "any value",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        type(None): "null",
    }
    return names.get(hint, str(hint))


def _names(block: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(block))  # type: ignore[arg-type]


def nearest(key: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return text to add to a message about an unknown key: the nearest known key, or no text; `cutoff` as of
    difflib."""
    match = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
    return f" (did you mean {match[0]!r}?)" if match else ""
