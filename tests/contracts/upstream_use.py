"""What our own source uses of upstream, as far as it can be read off: imports, overrides, inherited
attributes, configuration keys."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_fuse.host.start.compat.seams import PACKAGES
from verl_fuse.host.start.compat.source import NotFound, SourceTree, assigned

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Of torch only what is private is under contract.
UPSTREAM = set(PACKAGES) - {"torch"}


@dataclass(frozen=True)
class Override:
    """A method or class attribute of ours that replaces upstream's `target`."""

    target: str
    node: ast.stmt

    @property
    def open(self) -> bool:
        """Whether it passes on keyword arguments it does not know."""
        return isinstance(self.node, FUNCTIONS) and self.node.args.kwarg is not None


def imported(module: ast.Module) -> dict[str, str]:
    """Local name -> target, of everything imported from upstream; a module has a target without a
    name, "transfer_queue:"."""
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name: f"{a.name}:" for a in node.names if a.name.split(".")[0] in UPSTREAM}
    return found


def private_torch(module: ast.Module) -> Iterator[str]:
    """Targets in private modules of torch, and private names of its modules, that the module imports or takes
    of a module by attribute."""
    names: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if _private(node.module):
                yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names |= {
                a.asname or "torch": a.name if a.asname else "torch" for a in node.names if a.name.startswith("torch")
            }
    for owner, attribute in attributes(module):
        first, _, rest = owner.partition(".")
        if first in names and (_private(attribute) or _private(names[first])):
            yield f"{'.'.join(filter(None, (names[first], rest)))}:{attribute}"


def _private(name: str | None) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in (name or "").split("."))


def uses(module: ast.Module) -> Iterator[str]:
    """Targets that the module imports, and attributes it takes of an imported upstream module."""
    names = imported(module)
    yield from (target for target in names.values() if not target.endswith(":"))
    for owner, attribute in attributes(module):
        if names.get(owner, "").endswith(":"):
            yield names[owner] + attribute


def subclasses(module: ast.Module) -> Iterator[tuple[ast.ClassDef, str]]:
    """(class, target of its upstream base)."""
    names = imported(module)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield from (
                (node, names[base.id]) for base in node.bases if isinstance(base, ast.Name) and base.id in names
            )


def overrides(cls: ast.ClassDef, base: str, tree: SourceTree) -> Iterator[Override]:
    """What the class defines that its base has as well."""
    for node in cls.body:
        names = (
            [node.name] if isinstance(node, FUNCTIONS) else [t.id for t in assigned(node) if isinstance(t, ast.Name)]
        )
        yield from (Override(f"{base}.{name}", node) for name in names if _has(tree, f"{base}.{name}"))


def inherited(cls: ast.ClassDef, base: str) -> Iterator[str]:
    """What methods of the class take of `self` or `super()` that the class itself does not define."""
    own = {node.name for node in cls.body if isinstance(node, FUNCTIONS)}
    own |= {target.attr for node in ast.walk(cls) for target in assigned(node) if isinstance(target, ast.Attribute)}
    for owner, attribute in attributes(cls):
        if not attribute.startswith("__") and ((owner == "self" and attribute not in own) or owner == "super()"):
            yield f"{base}.{attribute}"


def attributes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner, attribute) of each attribute access, the owner as source text."""
    for found in ast.walk(node):
        if isinstance(found, ast.Attribute):
            yield ast.unparse(found.value), found.attr


def config_keys(module: ast.Module) -> Iterator[str]:
    """Dotted keys read off `config`: attribute chains, ended by `.get("key")` where that is how they end."""
    inner = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    # block = self.config.some.block
    blocks = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }
    gets = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            match node.args:
                case [ast.Constant(value=str(key)), *_]:
                    gets[id(node.func)] = key
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            text = ast.unparse(node)
            if id(node) in gets:
                text = text.removesuffix("get") + gets[id(node)]
            owner, _, key = text.partition(".")
            text = f"{blocks[owner]}.{key}" if owner in blocks else text
            for root in ("self.config.", "config.", "host.config.", "trainer.config.", "self._trainer.config."):
                if text.startswith(root):
                    yield text.removeprefix(root)
                    break


def module_strings(module: ast.Module) -> Iterator[str]:
    """Strings that name an upstream module."""
    for node in ast.walk(module):
        match node:
            case ast.Constant(value=str(text)) if (
                text.split(".")[0] in UPSTREAM and text.replace(".", "").isidentifier()
            ):
                yield text


def sources(*folders: Path) -> dict[str, ast.Module]:
    """Syntax trees of the folders' modules, the declarations of contracts left out."""
    files = (
        file
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        if "contracts" not in str(file.relative_to(folder))
    )
    return {f"{file.parent.name}/{file.name}": ast.parse(file.read_text()) for file in files}


def _has(tree: SourceTree, target: str) -> bool:
    try:
        tree.find(target)
    except NotFound:
        return False
    return True
