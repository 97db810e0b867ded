"""Finds definitions in the source of installed or unpacked packages, without importing any module of them.

Invariants (tests/unit/host/test_compat_source.py):
- a name is found where it is defined, through re-exports (`from .x import y`) and, for members, through base classes;
- of several definitions the last counts, like in Python;
- each file is read and parsed once.
"""

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import yaml

from verl_fuse.errors import FuseError

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# The C loader is ten times faster; it comes with PyYAML's wheels.
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Names found in a syntax tree that is still in use.
_NAMES: WeakKeyDictionary[Any, defaultdict[str, list[tuple[int, Any, str | None]]]] = WeakKeyDictionary()
_SET_ON_SELF: WeakKeyDictionary[Any, defaultdict[str, list[Any]]] = WeakKeyDictionary()


class NotFound(FuseError):
    """The source lacks the name that is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """A definition and its module."""

    module: str
    node: ast.stmt


class SourceTree:
    """Packages by their folders, e.g. {"verl": Path(".../site-packages/verl")}."""

    def __init__(self, roots: Mapping[str, Path], parse: Callable[[str], ast.Module] = ast.parse):
        self.roots = dict(roots)
        self._parse = parse
        self._modules: dict[str, ast.Module] = {}
        self._yaml: dict[str, Any] = {}

    @classmethod
    def installed(cls, *packages: str) -> "SourceTree":
        """Return the tree of the given top-level packages that are installed here."""
        specs = {package: importlib.util.find_spec(package) for package in packages}
        folders = {name: list(spec.submodule_search_locations or ()) for name, spec in specs.items() if spec}
        return cls({name: Path(found[0]) for name, found in folders.items() if found})

    def path(self, module: str) -> Path:
        """Return the file of a module."""
        top, *rest = module.split(".")
        if top in self.roots:
            stem = self.roots[top].joinpath(*rest)
            for candidate in (stem / "__init__.py", *([stem.with_suffix(".py")] if rest else [])):
                if candidate.is_file():
                    return candidate
        raise NotFound(f"there is no module {module}")

    def module(self, module: str) -> ast.Module:
        """Return the syntax tree of a module."""
        if module not in self._modules:
            self._modules[module] = self._parsed(self.path(module))
        return self._modules[module]

    def modules_with(self, package: str, word: str) -> Iterator[tuple[str, ast.Module]]:
        """Yield every module of a package whose text contains `word`."""
        root = self.roots[package]
        for path in sorted(root.rglob("*.py")):
            if word.encode() in path.read_bytes():
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
                yield name, self.module(name)

    def yaml(self, file: str) -> Any:
        """Return the content of a YAML file "package/folder/name.yaml"."""
        if file not in self._yaml:
            top, _, rest = file.partition("/")
            path = self.roots[top] / rest
            if not path.is_file():
                raise NotFound(f"there is no file {file}")
            try:
                self._yaml[file] = yaml.load(path.read_text(encoding="utf-8"), Loader=_YAML_LOADER)
            except (yaml.YAMLError, ValueError) as error:
                raise NotFound(f"{path} cannot be parsed: {error}") from error
        return self._yaml[file]

    def key(self, file: str, key: str) -> Any:
        """Return the value of a key of a YAML file, its parts joined by dots."""
        node = self.yaml(file)
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                raise NotFound(f"{file}: there is no key {key}")
            node = node[part]
        return node

    def find(self, target: str) -> Definition:
        """Return the function, class or assignment behind "module:name" or "module:Class.member"."""
        module, _, qualname = target.partition(":")
        self.module(module)
        name, *members = qualname.split(".")
        found = self._global(module, name, set())
        if found is None:
            raise NotFound(f"{module} has no {name}")
        for member in members:
            inner = next(self._members(found, member), None)
            if inner is None:
                raise NotFound(f"{module}:{name} has no {member}")
            found = inner
        return found

    def bases(self, found: Definition) -> Iterator[Definition]:
        """Yield the class itself, then its bases in these packages, at any depth."""
        waiting, seen = [found], set()
        while waiting:
            owner = waiting.pop()
            # A class that has the name of its base finds itself.
            if not isinstance(owner.node, ast.ClassDef) or owner.node in seen:
                continue
            seen.add(owner.node)
            yield owner
            parents = (self._global(owner.module, _name(base), set()) for base in reversed(owner.node.bases))
            waiting += filter(None, parents)

    def text(self, found: Definition) -> str:
        """Return the source lines of a definition, decorators included."""
        first = min([found.node.lineno, *(node.lineno for node in getattr(found.node, "decorator_list", []))])
        lines = self.path(found.module).read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join(lines[first - 1 : found.node.end_lineno])

    def _parsed(self, path: Path) -> ast.Module:
        try:
            return self._parse(path.read_text(encoding="utf-8"))
        # A ValueError: the file is not UTF-8.
        except (SyntaxError, ValueError) as error:
            raise NotFound(f"{path} cannot be parsed: {error}") from error

    def _global(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        if (module, name) in seen:
            return None
        seen.add((module, name))
        try:
            body = self.module(module)
        except NotFound:
            return None
        last: Definition | None = None
        names = _names(body)
        for _, node, alias in sorted([*names[name], *names["*"]], key=lambda place: place[0]):
            if alias is None:
                last = Definition(module, node)
            else:
                origin = _absolute(self, module, node)
                last = self._global(origin, name if alias == "*" else alias, seen) or last
        return last

    def _members(self, found: Definition, member: str) -> Iterator[Definition]:
        for owner in self.bases(found):
            assert isinstance(owner.node, ast.ClassDef)
            if definitions := [node for _, node, alias in _names(owner.node)[member] if alias is None]:
                yield Definition(owner.module, definitions[-1])
            yield from (Definition(owner.module, node) for node in _set_on_self(owner.node)[member])


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including statements in blocks such as `if`, `try` and `for`."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, tuples taken apart."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from getattr(target, "elts", [target])
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _names(owner: ast.Module | ast.ClassDef) -> Mapping[str, list[tuple[int, Any, str | None]]]:
    """Return, for each name that statements of `owner` bind, their positions and, for an import, the imported name
    ("*": all names)."""
    if owner not in _NAMES:
        found = _NAMES[owner] = defaultdict(list)
        for place, node in enumerate(statements(owner.body)):
            if isinstance(node, _DEFINITIONS):
                if not any(_name(mark) in ("setter", "deleter", "overload") for mark in node.decorator_list):
                    found[node.name].append((place, node, None))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name].append((place, node, alias.name))
            for target in assigned(node):
                if isinstance(target, ast.Name):
                    found[target.id].append((place, node, None))
    return _NAMES[owner]


def _set_on_self(owner: ast.ClassDef) -> Mapping[str, list[Any]]:
    """Return, for each attribute that methods of a class assign on `self`, the assignments."""
    if owner not in _SET_ON_SELF:
        found = _SET_ON_SELF[owner] = defaultdict(list)
        for method in statements(owner.body):
            for node in ast.walk(method) if isinstance(method, FunctionNode) else ():
                for target in assigned(node):
                    if isinstance(target, ast.Attribute) and _name(target.value) == "self":
                        found[target.attr].append(node)
    return _SET_ON_SELF[owner]


def _name(node: ast.expr) -> str:
    """Return the last name of an expression such as `a.b.C`, `C[int]` or `C(...)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _name(inner)
        case _:
            return ""


def _absolute(tree: SourceTree, module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    is_package = tree.path(module).name == "__init__.py"
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
