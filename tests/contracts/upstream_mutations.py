"""Changes that upstream might make to verl: each is one file's new text, with the contract it hits
and the class it deserves."""

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_fuse.host.start.compat.judge import Level
from verl_fuse.host.start.compat.signature import read_signature
from verl_fuse.host.start.compat.source import Definition, SourceTree
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
    label,
    package,
)

T = TypeVar("T")
# How many contracts of a kind each mutation is tried on.
EACH = 5


@dataclass(frozen=True)
class Mutation:
    """`text` replaces `file`; `hits` is the label of the contract it must be reported for, at `level`."""

    name: str
    file: Path
    text: str
    hits: str
    level: Level


def relevant(tree: SourceTree, contracts: Sequence[Contract]) -> list[Mutation]:
    """Mutations that break a contract, or change code that was read."""
    ours = [contract for contract in contracts if package(contract) == "verl"]
    # Other code is red there.
    strict = {label(contract) for contract in ours if isinstance(contract, Code) or getattr(contract, "exact", False)}
    found = []
    for name, kind, level, mutate in _RELEVANT:
        of_kind = _spread(
            [
                contract
                for contract in ours
                if type(contract) is kind and not (level is Level.YELLOW and label(contract) in strict)
            ]
        )
        edits = ((contract, edit) for contract in of_kind if (edit := mutate(tree, contract)) is not None)
        for contract, edit in itertools.islice(edits, EACH):
            found.append(Mutation(f"{name}: {label(contract)}", *edit, label(contract), level))
    return found


def irrelevant(tree: SourceTree, contracts: Sequence[Contract]) -> list[Mutation]:
    """Mutations that no contract may notice."""
    ours = [contract for contract in contracts if package(contract) == "verl"]
    functions = [contract for contract in ours if isinstance(contract, Function) and contract.body is not None]
    keys = [contract for contract in ours if isinstance(contract, ConfigKey)]
    files = sorted({tree.path(tree.find(contract.target).module) for contract in functions})
    named = {_file(tree, contract) for contract in ours}
    named |= {tree.path(module) for c in ours if isinstance(c, Uses) for module, _ in tree.modules_with("verl", c.name)}
    others = [
        path for path in sorted(tree.roots["verl"].rglob("*.py")) if path not in named and path.stat().st_size > 1000
    ]
    found: list[Mutation] = []

    def add(name: str, file: Path, text: str) -> None:
        if text != file.read_text():
            found.append(Mutation(f"{name}: {file.name}", file, text, "", Level.GREEN))

    for name, mutate in _IRRELEVANT_TO_FUNCTIONS:
        edits = filter(None, (mutate(tree, tree.find(contract.target)) for contract in _spread(functions)))
        for edit in itertools.islice(edits, EACH):
            add(name, *edit)
    for file in _spread(files)[:EACH]:
        text = file.read_text()
        add("everything reformatted, comments gone", file, ast.unparse(ast.parse(text)) + "\n")
        add("a new function", file, text + "\n\ndef unrelated_helper(trainer):\n    return trainer\n")
        add("another import", file, re.sub(r"^import ", "import abc\nimport ", text, count=1, flags=re.M))
    for file in others[:: len(others) // (2 * EACH)]:
        add("another module", file, re.sub(r"def (\w+)", r"def renamed_\1", file.read_text()))
    for contract in _spread(keys)[:EACH]:
        file = tree.roots["verl"].parent / contract.file
        add("a comment and a key in YAML", file, f"# A comment.\n{file.read_text()}\nunrelated_key: 1\n")
    return found


def _file(tree: SourceTree, contract: Contract) -> Path | None:
    """The file of what a contract is about; None if that is YAML, or the whole package."""
    if isinstance(contract, ConfigKey | ConfigGroup | Uses):
        return None
    if isinstance(contract, Registration):
        return tree.path(contract.module)
    return tree.path(tree.find(contract.target.split(",")[0]).module)


def _spread(items: list[T]) -> list[T]:
    """The items in an order that visits far apart ones first; always the same."""
    return [item for start in range(7) for item in items[start::7]]


def _function(tree: SourceTree, target: str) -> tuple[Definition, Path, list[str]]:
    found = tree.find(target)
    path = tree.path(found.module)
    return found, path, path.read_text().splitlines(keepends=True)


def _renamed(tree: SourceTree, contract: Any) -> tuple[Path, str] | None:
    found, path, lines = _function(tree, contract.target)
    name = re.split("[.:]", contract.target)[-1]
    owner = contract.target[: -len(name) - 1]
    if ":" in owner and sum(f"def {name}(" in tree.text(base) for base in tree.bases(tree.find(owner))) > 1:
        # Its base has one too: nothing is gone, the code behind the name is another.
        return None
    index = found.node.lineno - 1
    lines[index] = re.sub(rf"\b(def|class) {name}\b", rf"\1 {name}_renamed", lines[index], count=1)
    return path, "".join(lines)


def _without_parameter(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    names = [name for name in read_signature(contract.signature).positional if name not in ("self", "cls")]
    return _with_arguments(tree, contract, lambda node: _drop(node, names[-1])) if names else None


def _drop(node: Any, name: str) -> None:
    index = [argument.arg for argument in node.args.args].index(name)
    from_end = len(node.args.args) - index
    del node.args.args[index]
    if from_end <= len(node.args.defaults):
        del node.args.defaults[-from_end]


def _with_parameter(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    if "property" in contract.signature:
        return None
    return _with_arguments(
        tree,
        contract,
        lambda node: (node.args.kwonlyargs.append(ast.arg("brand_new")), node.args.kw_defaults.append(None)),
    )


def _with_other_default(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    def change(node: Any) -> None:
        node.args.defaults[-1] = ast.Constant("another default")

    # A default written `...` may be any.
    if not tree.find(contract.target).node.args.defaults or "=..." in contract.signature:  # type: ignore[attr-defined]
        return None
    return _with_arguments(tree, contract, change)


def _with_other_colour(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    """async becomes plain and the other way round."""
    found, path, lines = _function(tree, contract.target)
    index = found.node.lineno - 1
    turned = (
        lines[index].replace("async def ", "def ")
        if "async def " in lines[index]
        else lines[index].replace("def ", "async def ")
    )
    return path, "".join([*lines[:index], turned, *lines[index + 1 :]])


def _with_arguments(tree: SourceTree, contract: Function, change: Callable[[Any], Any]) -> tuple[Path, str]:
    """The function written out anew with other arguments."""
    found, path, lines = _function(tree, contract.target)
    # A tree of its own: the one of `tree` is shared.
    fresh = ast.walk(ast.parse("".join(lines)))
    node = next(node for node in fresh if type(node) is type(found.node) and node.lineno == found.node.lineno)  # type: ignore[attr-defined]
    change(node)
    first = min([found.node.lineno, *(mark.lineno for mark in _marks(found.node))])
    new = textwrap.indent(ast.unparse(node), " " * found.node.col_offset) + "\n"
    return path, "".join([*lines[: first - 1], new, *lines[found.node.end_lineno :]])


def _marks(node: ast.stmt) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])


def _with_other_body(tree: SourceTree, contract: Function | Code) -> tuple[Path, str] | None:
    if isinstance(contract, Function) and contract.body is None:
        return None
    module, _, names = contract.target.partition(":")
    found, path, lines = _function(tree, f"{module}:{names.split(',')[0]}")
    last = found.node.body[-1]  # type: ignore[attr-defined]
    lines[last.lineno - 1] = " " * last.col_offset + "something = new\n" + lines[last.lineno - 1]
    return path, "".join(lines)


def _overridden_in_between(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    """The class we name gets a method of its own where it had its base's."""
    owner, _, name = contract.target.rpartition(".")
    if ":" not in owner or not contract.signature.startswith("(") or contract.body is None:
        return None
    cls, path, lines = _function(tree, owner)
    if tree.find(contract.target).module == cls.module:
        return None
    new = f"\n    def {name}{contract.signature}:\n        pass\n"
    return path, "".join([*lines[: cls.node.end_lineno], new, *lines[cls.node.end_lineno :]])


def _with_abstract_member(tree: SourceTree, contract: Class) -> tuple[Path, str] | None:
    if contract.abstract is None:
        return None
    found, path, lines = _function(tree, contract.target)
    new = "\n    @abstractmethod\n    def brand_new(self): ...\n"
    return path, "".join([*lines[: found.node.end_lineno], new, *lines[found.node.end_lineno :]])


def _with_required_field(tree: SourceTree, contract: Class) -> tuple[Path, str] | None:
    if contract.required is None:
        return None
    found, path, lines = _function(tree, contract.target)
    new = "\n    brand_new: int\n"
    return path, "".join([*lines[: found.node.end_lineno], new, *lines[found.node.end_lineno :]])


def _positional_only(tree: SourceTree, contract: Function) -> tuple[Path, str] | None:
    if all(name in ("self", "cls") for name in read_signature(contract.signature).positional):
        return None

    def change(node: Any) -> None:
        node.args.posonlyargs, node.args.args = node.args.args, []

    return _with_arguments(tree, contract, change)


def _moved(tree: SourceTree, contract: Class | Code) -> tuple[Path, str] | None:
    """The class now lives in another module, and this one does not import it."""
    found, path, lines = _function(tree, contract.target.split(",")[0])
    if "." in contract.target.rpartition(":")[2] or found.module != contract.target.partition(":")[0]:
        return None
    first = min([found.node.lineno, *(mark.lineno for mark in _marks(found.node))])
    return path, "".join([*lines[: first - 1], *lines[found.node.end_lineno :]])


def _without_base(tree: SourceTree, contract: Class) -> tuple[Path, str] | None:
    found, path, lines = _function(tree, contract.target)
    index = found.node.lineno - 1
    lines[index] = re.sub(r"\(.*\)", "(object)", lines[index])
    return (path, "".join(lines)) if contract.bases else None


def _attribute_renamed(tree: SourceTree, contract: Attribute) -> tuple[Path, str] | None:
    name = re.split("[.:]", contract.target)[-1]
    path = tree.path(tree.find(contract.target).module)
    return path, re.sub(rf"\b{name}\b", f"{name}_renamed", path.read_text())


def _attribute_changed(tree: SourceTree, contract: Attribute) -> tuple[Path, str] | None:
    if contract.value is None:
        return None
    found, path, lines = _function(tree, contract.target)
    value: Any = found.node.value  # type: ignore[attr-defined]
    index = value.lineno - 1
    lines[index : value.end_lineno] = [lines[index][: value.col_offset] + "another_value\n"]
    return path, "".join(lines)


def _decorator_changed(tree: SourceTree, contract: Decorator) -> tuple[Path, str] | None:
    found, path, lines = _function(tree, contract.target)
    mark = next(mark for mark in _marks(found.node) if ast.unparse(mark) == contract.decorator)
    changed = (
        contract.decorator.replace("ONE_TO_ALL", "ALL_TO_ALL")
        .replace("mesh_name='", "mesh_name='other_")
        .replace("('", "('other_")
        .replace("='", "='other_")
    )
    lines[mark.lineno - 1 : mark.end_lineno] = [" " * (mark.col_offset - 1) + f"@{changed}\n"]
    return path, "".join(lines)


def _decorator_dropped(tree: SourceTree, contract: Decorator) -> tuple[Path, str] | None:
    found, path, lines = _function(tree, contract.target)
    mark = next(mark for mark in _marks(found.node) if ast.unparse(mark) == contract.decorator)
    del lines[mark.lineno - 1 : mark.end_lineno]
    return path, "".join(lines)


def _registration_dropped(tree: SourceTree, contract: Registration) -> tuple[Path, str] | None:
    path = tree.path(contract.module)
    return path, path.read_text().replace(contract.call, "pass")


def _key_changed(tree: SourceTree, contract: ConfigKey) -> tuple[Path, str] | None:
    if isinstance(contract.default, type) or contract.default is None:
        return None
    return _key(tree, contract, lambda line: re.sub(r":.*", ": another_default", line))


def _key_renamed(tree: SourceTree, contract: ConfigKey) -> tuple[Path, str] | None:
    return _key(tree, contract, lambda line: line.replace(":", "_renamed:", 1))


def _key(tree: SourceTree, contract: ConfigKey, change: Callable[[str], str]) -> tuple[Path, str] | None:
    """Change the line of a key: follow the indentation from part to part."""
    path = tree.roots["verl"].parent / contract.file
    lines = path.read_text().splitlines(keepends=True)
    index, indent = -1, ""
    for part in contract.key.split("."):
        index = next(i for i in range(index + 1, len(lines)) if re.match(rf"{indent}{part}:", lines[i]))
        following = next(
            (line for line in lines[index + 1 :] if line.strip() and not line.lstrip().startswith("#")), ""
        )
        indent = following[: len(following) - len(following.lstrip())]
    lines[index] = change(lines[index])
    return path, "".join(lines)


def _group_changed(tree: SourceTree, contract: ConfigGroup) -> tuple[Path, str] | None:
    path = tree.roots["verl"].parent / contract.file
    return path, path.read_text().replace(f"- {contract.entry}\n", f"- {contract.entry}_v2\n")


def _comparison_added(where: str, text: str) -> Callable[[SourceTree, Uses], tuple[Path, str] | None]:
    def add(tree: SourceTree, contract: Uses) -> tuple[Path, str] | None:
        found, path, lines = _function(tree, where)
        first = found.node.body[-1]  # type: ignore[attr-defined]
        lines.insert(first.lineno - 1, " " * first.col_offset + text + "\n")
        return path, "".join(lines)

    return add


def _comparison_dropped(tree: SourceTree, contract: Uses) -> tuple[Path, str] | None:
    found, path, lines = _function(tree, "verl.trainer.ppo.v1.trainer_base:PPOTrainer._submit_batch_to_rollout")
    text = "".join(lines)
    code = tree.text(found)
    return path, text.replace(code, code.replace('self.trainer_mode != "sync"', "True"))


_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_RELEVANT: list[tuple[str, type, Level, Callable[..., tuple[Path, str] | None]]] = [
    ("function renamed", Function, Level.RED, _renamed),
    ("parameter dropped", Function, Level.RED, _without_parameter),
    ("required parameter added", Function, Level.RED, _with_parameter),
    ("default changed", Function, Level.RED, _with_other_default),
    ("async turned", Function, Level.RED, _with_other_colour),
    ("body changed", Function, Level.YELLOW, _with_other_body),
    ("patched body changed", Code, Level.RED, _with_other_body),
    ("class moved", Class, Level.RED, _moved),
    ("overridden in between", Function, Level.YELLOW, _overridden_in_between),
    ("abstract member added", Class, Level.RED, _with_abstract_member),
    ("required field added", Class, Level.RED, _with_required_field),
    ("made positional-only", Function, Level.RED, _positional_only),
    ("base dropped", Class, Level.RED, _without_base),
    ("attribute renamed", Attribute, Level.RED, _attribute_renamed),
    ("value changed", Attribute, Level.RED, _attribute_changed),
    ("decorator changed", Decorator, Level.RED, _decorator_changed),
    ("decorator dropped", Decorator, Level.RED, _decorator_dropped),
    ("registry entry dropped", Registration, Level.RED, _registration_dropped),
    ("config default changed", ConfigKey, Level.RED, _key_changed),
    ("config key renamed", ConfigKey, Level.RED, _key_renamed),
    ("config group changed", ConfigGroup, Level.RED, _group_changed),
    ("comparison added", Uses, Level.RED, _comparison_added(f"{_BASE}.step", 'if self.trainer_mode == "sync": pass')),
    (
        "comparison added elsewhere",
        Uses,
        Level.RED,
        _comparison_added("verl.trainer.ppo.utils:need_critic", 'if config.trainer.v1.trainer_mode in ("sync",): pass'),
    ),
    (
        "match added",
        Uses,
        Level.RED,
        _comparison_added(f"{_BASE}.fit", "match self.trainer_mode:\n            case _: pass"),
    ),
    ("use added", Uses, Level.YELLOW, _comparison_added(f"{_BASE}.step", "mode = self.trainer_mode")),
    ("comparison dropped", Uses, Level.RED, _comparison_dropped),
]


def _commented(tree: SourceTree, found: Definition) -> tuple[Path, str] | None:
    path = tree.path(found.module)
    lines = path.read_text().splitlines(keepends=True)
    last: Any = found.node.body[-1]  # type: ignore[attr-defined]
    lines[last.lineno - 1] = " " * last.col_offset + "# A new comment.\n\n" + lines[last.lineno - 1]
    return path, "".join(lines)


def _documented(tree: SourceTree, found: Definition) -> tuple[Path, str] | None:
    """Another docstring, or a first one."""
    path = tree.path(found.module)
    lines = path.read_text().splitlines(keepends=True)
    node: Any = found.node
    first = node.body[0]
    new = " " * first.col_offset + '"""Something else."""\n'
    if ast.get_docstring(node) is not None:
        if len(node.body) == 1:
            return None
        lines[first.lineno - 1 : first.end_lineno] = [new]
    else:
        lines.insert(first.lineno - 1, new)
    return path, "".join(lines)


def _annotated(tree: SourceTree, found: Definition) -> tuple[Path, str] | None:
    path = tree.path(found.module)
    lines = path.read_text().splitlines(keepends=True)
    index = found.node.lineno - 1
    if "self," not in lines[index] and "self)" not in lines[index]:
        return None
    lines[index] = lines[index].replace("(self", '(self: "object"', 1)
    return path, "".join(lines)


_IRRELEVANT_TO_FUNCTIONS: list[tuple[str, Callable[[SourceTree, Definition], tuple[Path, str] | None]]] = [
    ("a comment", _commented),
    ("another docstring", _documented),
    ("an annotation", _annotated),
]
