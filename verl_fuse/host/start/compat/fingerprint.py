"""Makes fingerprints of code, which are equal when only comments, docstrings, formatting or a function's annotations
differ.

A fingerprint is taken over the syntax tree in a form of our own, since the output of `ast.dump` differs between
versions of Python: empty and absent fields are left out, and the parts of an f-string are joined.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence

# Positions in a tree that hold no code.
_SKIPPED = frozenset({"ctx", "type_comment", "kind", "type_ignores"})
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def fingerprint(nodes: Sequence[ast.AST]) -> str:
    """Return the first 16 hex digits of the SHA-256 of these definitions, decorators included."""
    return hashlib.sha256("\0".join(canonical(node) for node in nodes).encode()).hexdigest()[:16]


def canonical(node: ast.AST) -> str:
    """Return the code of a tree as one line of text, the same in every version of Python that parses it."""
    parts: list[str] = []
    _write(node, parts.append)
    return "".join(parts)


def _write(value: object, write: Callable[[str], None]) -> None:
    if isinstance(value, ast.AST):
        write(f"({type(value).__name__}")
        for name, child in _fields(value):
            write(f" {name}=")
            _write(child, write)
        write(")")
    elif isinstance(value, list):
        write("[")
        for child in value:
            _write(child, write)
            write(",")
        write("]")
    else:
        write(repr(value))


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    for name, child in ast.iter_fields(node):
        # A constant's None is its value.
        absent = child is None and not isinstance(node, ast.Constant)
        if name in _SKIPPED or absent or child == []:
            continue
        if name == "body" and isinstance(node, _DOCUMENTED):
            child = _without_docstring(node)
        elif isinstance(node, ast.JoinedStr):
            child = _joined(node.values)
        elif (isinstance(node, ast.arg) and name == "annotation") or name == "returns":
            continue
        yield name, child


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _joined(values: Sequence[ast.expr]) -> list[ast.expr | str]:
    """Return the parts of an f-string, with adjacent texts joined and empty texts left out."""
    parts: list[ast.expr | str] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            parts.append(value)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        elif value.value:
            parts.append(str(value.value))
    return parts
