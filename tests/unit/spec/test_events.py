"""Events are frozen, say when they happened, and are all in the guide for plugins."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from verl_fuse.spec import events

KINDS = events.Event.__subclasses__()
REPO = Path(events.__file__).parents[2]
README = REPO / "plugins/README.md"


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_frozen_and_says_when_it_happened(kind: type):
    event = kind(*range(len(fields(kind))))
    assert fields(kind)[:2] == ["step", "time"]
    assert (event.step, event.time) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 2


def test_the_guide_names_every_event_with_its_fields():
    section = README.read_text().partition("### `fuse_event(event)`")[2].partition("###")[0]
    items = re.findall(r"^- `([A-Z]\w+)`: (.*(?:\n  .*)*)$", section, re.MULTILINE)
    more = {name: re.sub(r"\([^)]*\)", "", said.partition("; with ")[2]) for name, said in items}
    documented = {name: re.findall(r"`(\w+)`", said) for name, said in more.items()}
    assert documented == {kind.__name__: fields(kind)[2:] for kind in KINDS}


def test_the_host_gives_every_event_its_fields():
    """Nothing else checks the names: they go through one method for all kinds."""
    trees = [ast.parse(file.read_text()) for file in (REPO / "verl_fuse/host").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    emitted = {
        ast.unparse(call.args[0]): sorted(str(keyword.arg) for keyword in call.keywords)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "emit"
    }
    assert emitted == {kind.__name__: sorted(fields(kind)[2:]) for kind in KINDS}
