"""Judges one contract against source: green, yellow (read it again) or red (we would break)."""

import ast
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from verl_fuse.host.start.compat.fingerprint import canonical, fingerprint
from verl_fuse.host.start.compat.signature import differences, signature_text
from verl_fuse.host.start.compat.source import Definition, FunctionNode, NotFound, SourceTree, statements
from verl_fuse.host.start.compat.uses import uses
from verl_fuse.spec.contract import (
    Attribute,
    Class,
    Code,
    ConfigGroup,
    ConfigKey,
    Contract,
    Decorator,
    Function,
    Registration,
    Uses,
    fingerprints,
)


class Level(IntEnum):
    """The state of a contract; the value is the exit code of `python -m ci.upstream check`."""

    GREEN = 0
    YELLOW = 1
    RED = 2


@dataclass(frozen=True, slots=True)
class ContractProblem:
    """A reason why a contract is not green. `missing`: the text stands for itself, because the target does not exist.
    `code`: the code behind the target differs, so that a diff can be shown."""

    level: Level
    text: str
    code: bool = False
    missing: bool = False


def judge(contract: Contract, tree: SourceTree) -> list[ContractProblem]:
    """Return the faults that keep the contract from being green in this tree; the contract's package must be there."""
    try:
        return _JUDGES[type(contract)](contract, tree)
    except NotFound as missing:
        return [ContractProblem(Level.RED, str(missing), missing=True)]


def _function(contract: Function, tree: SourceTree) -> list[ContractProblem]:
    found = tree.find(contract.target)
    if not isinstance(found.node, FunctionNode):
        return [ContractProblem(Level.RED, "is not a function any more")]
    changed = differences(contract.signature, signature_text(found.node), closed=contract.closed)
    problems = [
        ContractProblem(Level.RED if difference.breaks else Level.YELLOW, difference.text, True)
        for difference in changed
    ]
    if contract.body is not None and (now := fingerprint([found.node])) not in (read := fingerprints(contract.body)):
        level = Level.RED if contract.exact else Level.YELLOW
        problems.append(ContractProblem(level, f"body changed: fingerprint was {' or '.join(read)}, is {now}", True))
    return problems


def _class(contract: Class, tree: SourceTree) -> list[ContractProblem]:
    found = tree.find(contract.target)
    if not isinstance(found.node, ast.ClassDef):
        return [ContractProblem(Level.RED, "is not a class any more")]
    named = {ast.unparse(base).rpartition(".")[2] for owner in tree.bases(found) for base in owner.node.bases}  # type: ignore[attr-defined]
    problems = [ContractProblem(Level.RED, f"is not a {base} any more") for base in contract.bases if base not in named]
    if contract.abstract is not None:
        new = sorted(_abstract(found.node) - set(contract.abstract))
        problems += [ContractProblem(Level.RED, f"new abstract member {name}") for name in new]
    if contract.required is not None:
        new = sorted(_required(found.node) - set(contract.required))
        problems += [ContractProblem(Level.RED, f"new required field {name}") for name in new]
    return problems


def _abstract(node: ast.ClassDef) -> set[str]:
    members = [member for member in statements(node.body) if isinstance(member, FunctionNode)]
    marks = {
        member.name: {ast.unparse(mark).rpartition(".")[2] for mark in member.decorator_list} for member in members
    }
    return {name for name, found in marks.items() if "abstractmethod" in found}


def _required(node: ast.ClassDef) -> set[str]:
    fields = [field for field in statements(node.body) if isinstance(field, ast.AnnAssign) and field.value is None]
    return {ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)}


def _attribute(contract: Attribute, tree: SourceTree) -> list[ContractProblem]:
    found = tree.find(contract.target)
    if contract.value is None:
        return []
    value = getattr(found.node, "value", None)
    if value is None or canonical(value) != canonical(_expression(contract.value)):
        now = "gone" if value is None else ast.unparse(value)
        return [ContractProblem(Level.RED, f"value was {contract.value}, is {now}")]
    return []


def _decorator(contract: Decorator, tree: SourceTree) -> list[ContractProblem]:
    found = tree.find(contract.target)
    return _among(contract.decorator, getattr(found.node, "decorator_list", []), "decorator")


def _registration(contract: Registration, tree: SourceTree) -> list[ContractProblem]:
    made = [node.value for node in statements(tree.module(contract.module).body) if isinstance(node, ast.Expr)]
    return _among(contract.call, made, "call")


def _among(wanted: str, found: list[ast.expr], what: str) -> list[ContractProblem]:
    expected = _expression(wanted)
    grown = [node for node in found if _covers(node, expected)]
    if any(canonical(node) == canonical(expected) for node in grown):
        return []
    if grown:
        return [ContractProblem(Level.YELLOW, f"{what} has grown: {ast.unparse(grown[0])}")]
    return [
        ContractProblem(
            Level.RED, f"{what} {wanted} is gone; there are: {', '.join(map(ast.unparse, found)) or 'none'}"
        )
    ]


def _covers(found: ast.expr, expected: ast.expr) -> bool:
    """Tell whether `found` says at least as much as `expected`: the same call, its list arguments possibly longer."""
    if isinstance(found, ast.Call) and isinstance(expected, ast.Call):
        named = {keyword.arg: keyword.value for keyword in found.keywords}
        wanted = {keyword.arg: keyword.value for keyword in expected.keywords}
        return (
            canonical(found.func) == canonical(expected.func)
            and len(found.args) == len(expected.args)
            and named.keys() == wanted.keys()
            and all(map(_covers, found.args, expected.args))
            and all(_covers(named[name], wanted[name]) for name in wanted)
        )
    if isinstance(found, ast.List) and isinstance(expected, ast.List):
        return {canonical(item) for item in expected.elts} <= {canonical(item) for item in found.elts}
    return canonical(found) == canonical(expected)


def _config_key(contract: ConfigKey, tree: SourceTree) -> list[ContractProblem]:
    node = tree.key(contract.file, contract.key)
    if isinstance(contract.default, type):
        fits, before = isinstance(node, contract.default), f"a {contract.default.__name__}"
    else:
        fits, before = type(node) is type(contract.default) and node == contract.default, repr(contract.default)
    if not fits:
        return [ContractProblem(Level.RED, f"default was {before}, is {node!r}")]
    return []


def _config_group(contract: ConfigGroup, tree: SourceTree) -> list[ContractProblem]:
    group, _, option = contract.entry.partition(": ")
    node = tree.yaml(contract.file)
    entries = node.get("defaults") if isinstance(node, dict) else None
    if ({group: option} if option else group) in (entries or ()):
        return []
    return [ContractProblem(Level.RED, f"the defaults list has no {contract.entry}")]


def _uses(contract: Uses, tree: SourceTree) -> list[ContractProblem]:
    comparisons, others = uses(tree, contract.package, contract.name)
    return [
        *_counted(contract.comparisons, comparisons, Level.RED, "comparison"),
        *_counted(contract.others, others, Level.YELLOW, "use"),
    ]


def _counted(pinned: tuple[str, ...], found: list[str], level: Level, what: str) -> list[ContractProblem]:
    before, after = Counter(pinned), Counter(found)
    return [
        *(ContractProblem(level, f"new {what} in {place}") for place in sorted((after - before).elements())),
        *(ContractProblem(level, f"{what} gone from {place}") for place in sorted((before - after).elements())),
    ]


def _code(contract: Code, tree: SourceTree) -> list[ContractProblem]:
    now = fingerprint([found.node for found in code(contract, tree)])
    if now in (read := fingerprints(contract.fingerprints)):
        return []
    changed = f"changed: fingerprint was {' or '.join(read)}, is {now}"
    text = (
        f"patch {contract.patch}: the patched code {changed}; drop the patch if upstream is fixed, else read it again"
        if contract.promise is None
        else f"{contract.promise}: the code that keeps this promise {changed}; read it, and add the fingerprint if it "
        "still does"
    )
    return [ContractProblem(Level.RED, text, True)]


def code(contract: Contract, tree: SourceTree) -> list[Definition]:
    """Return the definitions behind a contract about code; none for other contracts."""
    if not isinstance(contract, Function | Code):
        return []
    return _found(place(contract, tree), tree)


def place(contract: Function | Code, tree: SourceTree) -> str:
    """Return the target that is judged: the first that exists of the contract's own and of those `before` it; its own
    where none exists."""
    before = contract.before if isinstance(contract, Code) else ()
    return next((target for target in (contract.target, *before) if _exists(target, tree)), contract.target)


def _found(target: str, tree: SourceTree) -> list[Definition]:
    module, _, names = target.partition(":")
    return [tree.find(f"{module}:{name}") for name in names.split(",")]


def _exists(target: str, tree: SourceTree) -> bool:
    try:
        return bool(_found(target, tree))
    except NotFound:
        return False


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


_JUDGES: dict[type, Any] = {
    Function: _function,
    Class: _class,
    Attribute: _attribute,
    Decorator: _decorator,
    Registration: _registration,
    ConfigKey: _config_key,
    ConfigGroup: _config_group,
    Uses: _uses,
    Code: _code,
}
