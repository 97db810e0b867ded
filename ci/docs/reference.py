"""Writes the reference of public modules from their docstrings: one page of Markdown for each, and one that lists them.

Invariants (tests/unit/docs/test_reference.py):
- every public class and function of a module is on its page, with its signature and its docstring;
- a module that is not installed has no page; an unfinished one, with a public name without a docstring, is refused.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from verl_fuse.errors import FuseError

# In the order in which the author of a policy meets them.
MODULES = (
    "verl_fuse.hookspecs",
    "verl_fuse.testing",
    "verl_fuse.feature",
    "verl_fuse.spec.step",
    "verl_fuse.spec.prompts",
    "verl_fuse.spec.events",
    "verl_fuse.spec.timeline",
    "verl_fuse.spec.contract",
    "verl_fuse.spec.block",
)
HEAD = """# Reference

What plugins and scripts may import, from the docstrings of the modules. How the hooks play together is in [Write a
plugin](../plugins/README.md).

| module | |
|---|---|
"""


def write(folder: Path, names: Sequence[str] = MODULES) -> None:
    """Write `folder`/README.md and a page for each module that is there; a FuseError names what has no docstring."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = [importlib.import_module(name) for name in names if find_spec(name)]
    bare = [f"{module.__name__}.{name}" for module in modules for name, each in public(module) if not _doc(each)]
    if bare:
        raise FuseError(*(f"{name}: needs a docstring, which the reference shows" for name in bare))
    for module in modules:
        (folder / f"{module.__name__}.md").write_text(page(module), encoding="utf-8")
    rows = [f"| [`{module.__name__}`]({module.__name__}.md) | {_first(module)} |\n" for module in modules]
    (folder / "README.md").write_text(HEAD + "".join(rows), encoding="utf-8")


def page(module: ModuleType) -> str:
    """Return the page of a module."""
    parts = [f"# `{module.__name__}`", _doc(module)]
    for name, each in public(module):
        parts += [f"## `{name}`", f"```python\n{_signature(name, each)}\n```", *_remarks(each), _doc(each)]
        if dataclasses.is_dataclass(each):
            parts.append(_fields(each))
        if isinstance(each, type):
            parts += [_member(member, found) for member, found in _members(each)]
    return "\n\n".join(part for part in parts if part) + "\n"


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module: those that it lists (`__all__`), else those that it defines,
    in its order."""
    listed = vars(module).get("__all__")
    for name, each in vars(module).items():
        own = (
            name in listed
            if listed
            else getattr(each, "__module__", None) == module.__name__ and not name.startswith("_")
        )
        if own and isinstance(each, type | FunctionType):
            yield name, each


def _doc(each: Any) -> str:
    """Return a docstring as Markdown, which wants an empty line before a list; nothing for one that a dataclass made
    itself."""
    said = inspect.cleandoc(each.__doc__ or "")
    if isinstance(each, type) and said.startswith(f"{each.__name__}("):
        return ""
    return re.sub(r"(?<!\n)\n(?=- )(?<!^)", "\n\n", said, count=1)


def _first(module: ModuleType) -> str:
    return " ".join(_doc(module).partition("\n\n")[0].split())


def _signature(name: str, each: Any) -> str:
    """Return the call of a function or class, one parameter a line where it is long."""
    try:
        found = inspect.signature(each)
    except ValueError:
        return f"class {name}"
    word = "class" if isinstance(each, type) else "def"
    shown = [_parameter(one) for one in found.parameters.values()]
    if word == "class" and (getattr(each, "_is_protocol", False) or not shown):
        return f"class {name}"
    returned = "" if word == "class" or found.return_annotation is inspect.Signature.empty else _named(found)
    line = f"{word} {name}({', '.join(shown)}){returned}"
    return line if len(line) <= 90 else f"{word} {name}(\n    " + ",\n    ".join(shown) + f",\n){returned}"


def _named(found: inspect.Signature) -> str:
    return f" -> {_short(inspect.formatannotation(found.return_annotation))}"


def _parameter(one: inspect.Parameter) -> str:
    return re.sub(r" = <[^>]*>", " = ...", _short(str(one)))


def _short(annotation: str) -> str:
    """Return a type without the modules that its names are from."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotation)


def _remarks(each: Any) -> list[str]:
    """Say of a hook that it stops at the first answer."""
    first = getattr(each, "verl_fuse_spec", {}).get("firstresult")
    return ["*A hook; it stops at the first plugin that does not answer `None`.*"] if first else []


def _fields(block: Any) -> str:
    rows = []
    for each in dataclasses.fields(block):
        made = each.default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING
        default = "made anew" if made else "" if each.default is dataclasses.MISSING else f"`{each.default!r}`"
        kind = _short(inspect.formatannotation(each.type))
        rows.append(f"| `{each.name}` | `{kind}` | {default} |")
    table = "\n".join(rows)
    return f"| field | type | default |\n|---|---|---|\n{table}" if rows else ""


def _members(each: type) -> Iterator[tuple[str, Any]]:
    for name, found in vars(each).items():
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if not name.startswith("_") and isinstance(function, FunctionType) and function.__doc__:
            yield name, found


def _member(name: str, found: Any) -> str:
    if isinstance(found, property):
        return f"### `{name}`\n\nProperty. {_doc(found.fget)}"
    function = getattr(found, "__func__", found)
    return f"### `{name}`\n\n```python\n{_signature(name, function)}\n```\n\n{_doc(function)}"
