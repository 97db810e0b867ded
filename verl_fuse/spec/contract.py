"""Describes the upstream code that we rest on as data: one contract per seam, judged against source text
(verl_fuse/host/start/compat).

What a contract only copies from upstream's source is LOCKED: it is in the lock file, contracts.lock.json, beside the
module that declares the contract (of a plugin: the module that implements `fuse_contracts`). `python -m ci.upstream
lock` writes these files.

A target is "package.module:name" or "package.module:Class.member"; it may be defined elsewhere as long as it
can be imported from there. Broken means red: we would fail or, worse, go on with wrong numbers. A change that need only
be read again is yellow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

# The fingerprint of one version of some code, or of each version that we have read where they differ.
Fingerprints: TypeAlias = str | tuple[str, ...]

# In place of a value: it is in the lock file.
LOCKED = "locked"


@dataclass(frozen=True, slots=True)
class Name:
    """A function, class or attribute that is judged by the lock file: a class has to be one, an attribute has to exist,
    a function is a `Function` with the locked signature and, unless it is only `called`, the locked fingerprints."""

    target: str
    closed: bool = False
    exact: bool = False
    called: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method that we call or override, or whose behaviour we copy.

    `signature` is written as in its `def`, without annotations, after "async", "static", "class" or "property" where
    these apply, e.g. "async (self, request_id, **extra)"; a default written `...` stands for any. `body` is the
    fingerprint of the code we have read, or the fingerprints of several versions: other code is yellow, or red if it
    must be `exact`. `closed`: our override takes no parameter that upstream adds.
    """

    target: str
    signature: str
    body: Fingerprints | None = None
    closed: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Class:
    """A class we subclass or construct; every name of `bases` must be among its bases, at any depth.

    `abstract` are all members that a subclass has to define, `required` all fields of a dataclass or pydantic model
    that have no default and so must be given; None if it does not matter.
    """

    target: str
    bases: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    required: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A module variable, class variable, dataclass field or instance attribute; `value`, if given, is the source text
    of its value."""

    target: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Decorator:
    """A decorator that a definition carries: a registry entry, or the dispatch of a method by Ray. Lists
    may have grown (yellow)."""

    target: str
    decorator: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A call that a module makes when it is imported: a registry entry. Lists may have grown (yellow)."""

    module: str
    call: str


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of a YAML file ("verl/trainer/config/ppo_trainer.yaml") with its default, or the default's type
    where only that matters."""

    file: str
    key: str
    default: Any = LOCKED


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """An entry of a YAML file's defaults list, e.g. "rollout@actor_rollout_ref.rollout: rollout"."""

    file: str
    entry: str


@dataclass(frozen=True, slots=True)
class Uses:
    """Every place of a package that compares `name` with a value (a change is red), or uses it otherwise (yellow).

    A place is "module:qualname: text", the text being the comparison or the expression that reads the name.
    """

    package: str
    name: str
    comparisons: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Source that a runtime patch replaces, or that keeps a promise of ours: "module:name,Class.method" with its
    fingerprints. Other code is red, a fix included.

    `before` has the targets of earlier versions, latest first, where upstream moved the code; the first target that
    exists is judged.
    """

    target: str
    fingerprints: Fingerprints = LOCKED
    patch: str | None = None
    promise: str | None = None
    before: tuple[str, ...] = ()


Contract: TypeAlias = (
    Name | Function | Class | Attribute | Decorator | Registration | ConfigKey | ConfigGroup | Uses | Code
)


_TYPES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)} | {"any": object, "none": type(None)}


def names(text: str, *, closed: bool = False, exact: bool = False) -> tuple[Name | Attribute, ...]:
    """Return a contract for each target in `text`, separated by spaces: "module:Class.member" in full, or ":name" of
    the module before, or ".member" of the class before. A target with parentheses, "step()", is a function that is only
    called: its code may change. One with an equals sign, "limit=", is an attribute whose value is locked too; one with
    a question mark, "rank?", may be anything that exists."""
    return tuple(
        Attribute(target[:-1], LOCKED if target.endswith("=") else None)
        if target.endswith(("=", "?"))
        else Name(target.removesuffix("()"), closed, exact, target.endswith("()"))
        for target in _targets(text)
    )


def kept(promise: str, text: str, before: str = "") -> Code:
    """Return the contract about the code that keeps a promise, whose targets are written as for `names`; `before` is
    where upstream had it."""
    return Code(_joined(text), promise=promise, before=(_joined(before),) if before else ())


def config(text: str) -> tuple[ConfigKey | ConfigGroup, ...]:
    """Return a contract for each key in `text`, separated by spaces, after the YAML file that has it. The default is
    locked, or written as its type behind a colon: "trainer.nnodes:int"; "any" stands for all defaults, "none" for null.
    A word with "@" is a group of the file's defaults list, "rollout@actor_rollout_ref.rollout", whose option is
    locked."""
    found, file = [], ""
    for word in text.split():
        key, _, kind = word.partition(":")
        if word.endswith(".yaml"):
            file = word
        elif "@" in word:
            found.append(ConfigGroup(file, f"{word}: {LOCKED}"))
        else:
            found.append(ConfigKey(file, key, _TYPES[kind] if kind else LOCKED))
    return tuple(found)


def _targets(text: str) -> Iterator[str]:
    before = ""
    for word in text.split():
        module, _, name = before.partition(":")
        if word.startswith(":"):
            word = module + word
        elif word.startswith("."):
            word = f"{module}:{name.partition('.')[0]}{word}"
        yield word
        before = word


def _joined(text: str) -> str:
    found = list(_targets(text))
    return f"{found[0].partition(':')[0]}:{','.join(target.partition(':')[2] for target in found)}"


def fingerprints(found: Fingerprints) -> tuple[str, ...]:
    """Return all fingerprints as a tuple."""
    return (found,) if isinstance(found, str) else found


def label(contract: Contract) -> str:
    """Return the subject of the contract, in one line."""
    match contract:
        case ConfigKey(file, key):
            return f"{file}: {key}"
        case ConfigGroup(file, entry):
            return f"{file}: defaults, {entry}"
        case Decorator(target, decorator):
            return f"{target} @{decorator}"
        case Registration(module, call):
            return f"{module}: {call}"
        case Uses(package, name):
            return f"{package}: uses of {name}"
        case _:
            return contract.target


def package(contract: Contract) -> str:
    """Return the top-level package that the contract is about."""
    match contract:
        case ConfigKey(file) | ConfigGroup(file):
            return file.partition("/")[0]
        case Registration(module):
            return module.partition(".")[0]
        case Uses(name):
            return name
        case _:
            return contract.target.partition(":")[0].partition(".")[0]
