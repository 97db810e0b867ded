"""The reference of public modules, made from their docstrings."""

import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.docs.reference import MODULES, page, public, write
from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import fuse_assign, fuse_event


@pytest.mark.parametrize("name", [name for name in MODULES if find_spec(name)])
def test_every_public_name_is_there_with_its_docstring(name: str):
    module = importlib.import_module(name)
    text = " ".join(page(module).split())
    assert list(public(module))
    for each, found in public(module):
        assert f"## `{each}`" in text
        said = inspect.cleandoc(found.__doc__ or "").partition("\n\n")[0]
        assert " ".join(said.partition("\n- ")[0].split()) in text


def test_a_hook_has_its_signature_and_says_that_it_stops_at_the_first_answer():
    text = page(importlib.import_module("verl_fuse.hookspecs"))
    assign = text.partition("## `fuse_assign`")[2].partition("\n## ")[0]
    assert "prompts: Sequence[Prompt],\n    replicas: Sequence[ReplicaView]," in assign
    assert "it stops at the first plugin" in assign
    assert inspect.cleandoc(fuse_assign.__doc__ or "") in assign
    assert "it stops at the first" not in text.partition("## `fuse_event`")[2].partition("\n## ")[0]
    assert fuse_event.__doc__


def test_a_value_has_a_table_of_its_fields_and_its_properties():
    text = page(importlib.import_module("verl_fuse.spec.step"))
    view = text.partition("## `Capacity`")[2].partition("\n## ")[0]
    assert "| `sequences` | `int` |  |\n| `tokens` | `float` | `inf` |" in view
    assert "### `room`\n\n```python\ndef room(self, each: float) -> int\n```" in view


def test_a_list_in_a_docstring_is_one_on_the_page():
    text = page(importlib.import_module("verl_fuse.spec.timeline"))
    assert "test_timeline.py):\n\n- a span never ends" in text


def test_a_module_that_is_not_there_has_no_page(tmp_path: Path):
    write(tmp_path / "reference", ("verl_fuse.spec.step", "verl_fuse.no_such_module"))
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["README.md", "verl_fuse.spec.step.md"]


def test_a_name_without_a_docstring_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_bare.py").write_text('"""A module."""\n\n\ndef bare() -> int:\n    return 1\n')
    with pytest.raises(FuseError, match=r"acme_bare\.bare: needs a docstring"):
        write(tmp_path / "reference", ("acme_bare",))
    assert not list((tmp_path / "reference").glob("*.md"))
