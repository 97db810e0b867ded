"""One public name is one thing: no two modules have a class, a type or a constant of the same name."""

import ast
from collections.abc import Iterator

from test_structure import modules, tree

# What every module of a kind has under the same name, found by whoever asks all of them.
PER_MODULE = {
    "CONTRACTS": "what a module of contracts declares",
    "EXAMPLES": "the end of a command's help",
    "FUNCTIONS": "what a runtime patch changes",
    "KEPT": "what a plugin keeps beside checkpoints",
    "PATCH": "a runtime patch",
    "T": "a type variable",
}


def public_names(module: ast.Module) -> Iterator[str]:
    """Return classes, types and constants that the module defines, including those in blocks such as `if`."""
    pending: list[ast.stmt] = list(module.body)
    for node in pending:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))
        elif isinstance(node, ast.If | ast.Try):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def holders() -> dict[str, list[str]]:
    """Modules by the public name, capitalised, that they define."""
    found: dict[str, list[str]] = {}
    for module, path in sorted(modules().items()):
        for name in {name for name in public_names(tree(path)) if name[0].isupper()}:
            found.setdefault(name, []).append(module)
    return found


def test_no_two_modules_define_the_same_name():
    shared = {name: where for name, where in holders().items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in PER_MODULE} == {}


def test_every_exception_is_needed():
    found = holders()
    assert [name for name in PER_MODULE if len(found.get(name, ())) < 2] == []


def test_names_are_found_wherever_a_module_defines_them():
    text = "class A: pass\nB = C = 1\nD: int = 2\nE, (F, g) = 1, (2, 3)\nif g:\n    class H:\n        I = 1\nH.x = 2\n"
    assert list(public_names(ast.parse(text))) == ["A", "B", "C", "D", "E", "F", "g", "H"]
