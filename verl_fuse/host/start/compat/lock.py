"""Reads lock files, and fills contracts with the locked values.

A lock file maps the label of a contract to a `Locked` entry. A package has at most one such file, beside the module
that declares its contracts; without one, no contract of the package may be locked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.contract import (
    LOCKED,
    Attribute,
    Class,
    Code,
    ConfigGroup,
    ConfigKey,
    Contract,
    Fingerprints,
    Function,
    Name,
    label,
)

FILE = "contracts.lock.json"


@dataclass(frozen=True, slots=True)
class Locked:
    """What a contract copies from upstream: of which kind its target is ("function", "class", "attribute", "code",
    "key" or "group"), and what the kind has. `read` are fingerprints, in the order in which the code was read; `value`
    is an attribute's source text, a key's default, or a group's option."""

    kind: str
    signature: str | None = None
    read: tuple[str, ...] = ()
    value: Any = None


def read(file: Path) -> dict[str, Locked]:
    """Return the entries of a lock file; none where there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {name: Locked(**entry | {"read": tuple(entry.get("read", ()))}) for name, entry in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FuseError(f"{file} is no lock file: {error}") from error


def is_locked(contract: Contract) -> bool:
    """Tell whether the contract has a value in the lock file."""
    match contract:
        case Name():
            return True
        case ConfigKey(default=value) | Code(fingerprints=value) | Attribute(value=value):
            return isinstance(value, str) and value == LOCKED
        case ConfigGroup(entry=value):
            return value.endswith(f": {LOCKED}")
        case _:
            return False


def filled(contract: Contract, entries: Mapping[str, Locked], file: Path) -> Contract:
    """Return the contract with its locked values; a FuseError if the file does not have them."""
    if not is_locked(contract):
        return contract
    entry = entries.get(label(contract))
    if entry is None:
        raise FuseError(f"{label(contract)} is not in {file}: `python -m ci.upstream lock` writes it")
    return fill(contract, entry)


def fill(contract: Contract, entry: Locked) -> Contract:
    """Return the locked contract with the values of its entry."""
    match contract:
        case Name(target) if entry.kind == "function":
            body = None if contract.called else _fingerprints(entry.read)
            return Function(target, entry.signature or "()", body, contract.closed, contract.exact)
        case Name(target):
            return Class(target) if entry.kind == "class" else Attribute(target)
        case Attribute():
            return replace(contract, value=entry.value)
        case ConfigGroup(entry=group):
            return replace(contract, entry=group.removesuffix(LOCKED) + str(entry.value))
        case ConfigKey():
            return replace(contract, default=entry.value)
        case Code():
            return replace(contract, fingerprints=_fingerprints(entry.read))
        case _:
            return contract


def _fingerprints(read: tuple[str, ...]) -> Fingerprints:
    return read[0] if len(read) == 1 else read
