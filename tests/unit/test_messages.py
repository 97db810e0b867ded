"""No message begins with the name that is printed before it: "verl-fuse: verl-fuse: ...".

Errors get their prefix where they end a command or a run (verl_fuse/cli/ending.py, verl_fuse/host/start/preflight.py),
lines of a log in verl_fuse/host/record/logs.py.
"""

import ast
from collections.abc import Iterator

import pytest
from test_structure import modules, tree

# vLLM's processes have no log of verl's: what is logged there has nothing before it.
UNMARKED = ("verl_fuse_speculation.proposer",)
ERRORS = ("FuseError", "Refusal")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


def begun_twice(module: ast.Module, logs: bool = True) -> Iterator[str]:
    """Yield the first words of messages that begin with the name."""
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        function = call.func
        logged = (
            isinstance(function, ast.Attribute)
            and function.attr in LEVELS
            and isinstance(function.value, ast.Name)
            and function.value.id == "logger"
        )
        if (logs and logged) or (isinstance(function, ast.Name) and function.id in ERRORS):
            yield from (text for text in map(first_words, call.args) if text.startswith("verl-fuse"))


def first_words(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return str(node.value) if isinstance(node, ast.Constant) else ""


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_message_begins_with_the_name(module: str):
    assert list(begun_twice(tree(modules()[module]), logs=module not in UNMARKED)) == []


def test_messages_are_found_in_errors_and_logs():
    text = (
        'raise FuseError("fine", f"verl-fuse {x}: bad")\nlogger.info("verl-fuse: %d", 1)\nprint("verl-fuse: first")\n'
        'logger.warning(f"{name}: verl-fuse")\n'
    )
    assert list(begun_twice(ast.parse(text))) == ["verl-fuse ", "verl-fuse: %d"]
    assert list(begun_twice(ast.parse(text), logs=False)) == ["verl-fuse "]
