"""Finds every place of a package that reads a name: verl tells trainer modes apart by comparing `trainer_mode`."""

import ast
from collections.abc import Iterator

from verl_fuse.host.start.compat.source import SourceTree

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def uses(tree: SourceTree, package: str, name: str) -> tuple[list[str], list[str]]:
    """Return (comparisons, other uses) of `name` as a variable, an attribute or a string, each as "module:qualname:
    text"."""
    comparisons: list[str] = []
    others: list[str] = []
    for module, body in tree.modules_with(package, name):
        for scope, deciding, node in _reads(body, name, "", None):
            place = f"{module}:{scope or '<module>'}: "
            if isinstance(deciding, ast.Match):
                comparisons.append(f"{place}match {ast.unparse(deciding.subject)}")
            elif deciding is not None:
                comparisons.append(place + ast.unparse(deciding))
            else:
                others.append(place + ast.unparse(node))
    return comparisons, others


def _reads(
    node: ast.AST, name: str, scope: str, deciding: ast.Compare | ast.Match | None
) -> Iterator[tuple[str, ast.Compare | ast.Match | None, ast.expr]]:
    """Yield (qualname, the enclosing comparison or None, the expression) of each read below `node`."""
    if isinstance(node, ast.expr) and _reads_name(node, name):
        yield scope, deciding, node
        return
    if isinstance(node, _SCOPES):
        scope = f"{scope}.{node.name}" if scope else node.name
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Match) and child is node.subject):
            yield from _reads(child, name, scope, node)
        else:
            # A call inside a comparison decides as well; the body of a case is not the comparison.
            yield from _reads(child, name, scope, deciding if isinstance(node, ast.expr) else None)


def _reads_name(node: ast.expr, name: str) -> bool:
    match node:
        case ast.Attribute(attr=found, ctx=ast.Load()) | ast.Name(id=found, ctx=ast.Load()) | ast.Constant(value=found):
            return found == name
        case _:
            return False
