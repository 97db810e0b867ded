"""The invariants in the docstring of verl_fuse/host/start/compat/source.py, on a small package."""

import ast
from pathlib import Path

import pytest

from verl_fuse.host.start.compat.source import NotFound, SourceTree

FILES = {
    "__init__.py": "raise RuntimeError('imported')\n"
    "from .deep.trainer import Trainer as Coach\n"
    "from acme.star import *\n",
    "star.py": "from .deep import helper\nREGISTRY: dict = {}\nLEFT, RIGHT = 1, 2\n",
    "deep/__init__.py": "def helper(a): ...\n",
    "deep/base.py": """
class Base:
    kind = "base"
    def __init__(self):
        self.steps = 0
        self.first, self.second = 1, 2
        self.buffer: list = []
    def step(self): ...
    @property
    def mode(self): ...
    @mode.setter
    def mode(self, value): ...
""",
    "deep/trainer.py": """
import os
from acme.deep.base import Base
if os.name == "posix":
    @decorated
    class Trainer(Base):
        def step(self): return 1
        def step(self): return 2
try:
    import fast
except ImportError:
    def fast(): ...
def changed(): return 1
changed = 2
""",
}


@pytest.fixture
def acme(tmp_path: Path) -> SourceTree:
    for name, text in FILES.items():
        file = tmp_path / "acme" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return SourceTree({"acme": tmp_path / "acme"})


@pytest.mark.parametrize(
    ("target", "module", "line"),
    [
        ("acme.deep.trainer:Trainer", "acme.deep.trainer", 6),
        ("acme:Coach", "acme.deep.trainer", 6),
        ("acme:REGISTRY", "acme.star", 2),
        ("acme:helper", "acme.deep", 1),
        ("acme.star:RIGHT", "acme.star", 3),
        ("acme.deep.trainer:fast", "acme.deep.trainer", 12),
        ("acme.deep.trainer:changed", "acme.deep.trainer", 14),
        ("acme.deep.trainer:Trainer.step", "acme.deep.trainer", 8),
        ("acme:Coach.kind", "acme.deep.base", 3),
        ("acme:Coach.steps", "acme.deep.base", 5),
        ("acme:Coach.second", "acme.deep.base", 6),
        ("acme:Coach.buffer", "acme.deep.base", 7),
        ("acme:Coach.mode", "acme.deep.base", 10),
    ],
)
def test_a_name_is_found_where_it_is_defined(acme: SourceTree, target: str, module: str, line: int):
    found = acme.find(target)
    assert (found.module, found.node.lineno) == (module, line)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("acme.gone:X", "there is no module acme.gone"),
        ("other:X", "there is no module other"),
        ("acme.deep:gone", "acme.deep has no gone"),
        ("acme:Coach.gone", "acme:Coach has no gone"),
        ("acme.deep.trainer:changed.gone", "acme.deep.trainer:changed has no gone"),
    ],
)
def test_what_is_not_there_is_named(acme: SourceTree, target: str, message: str):
    with pytest.raises(NotFound, match=f"^{message}$"):
        acme.find(target)


def test_the_text_of_a_definition_includes_its_decorators(acme: SourceTree):
    text = acme.text(acme.find("acme:Coach"))
    assert text.startswith("    @decorated\n    class Trainer(Base):\n")
    assert text.endswith("return 2\n")


def test_each_file_is_parsed_once(acme: SourceTree):
    parsed: list[str] = []

    def parse(text: str) -> ast.Module:
        parsed.append(text)
        return ast.parse(text)

    tree = SourceTree(acme.roots, parse)
    for target in ("acme:Coach.steps", "acme:Coach.step", "acme.deep.base:Base.step"):
        tree.find(target)
    assert len(parsed) == len(set(parsed)) == 4


def test_what_cannot_be_parsed_is_missing(acme: SourceTree):
    (acme.roots["acme"] / "broken.py").write_text("def f(:\n")
    with pytest.raises(NotFound, match=r"broken\.py cannot be parsed: invalid syntax"):
        acme.find("acme.broken:f")


@pytest.mark.parametrize("name", ["latin.py", "latin.yaml"])
def test_what_is_not_utf_8_is_missing(acme: SourceTree, name: str):
    (acme.roots["acme"] / name).write_bytes("# é".encode("latin-1"))
    with pytest.raises(NotFound, match="'utf-8' codec can't decode"):
        acme.yaml(f"acme/{name}") if name.endswith("yaml") else acme.find("acme.latin:f")


def test_a_class_named_like_its_base_ends_the_search(acme: SourceTree):
    (acme.roots["acme"] / "same.py").write_text("from acme.deep.base import Base\nclass Base(Base): ...\n")
    with pytest.raises(NotFound, match=r"acme\.same:Base has no gone"):
        acme.find("acme.same:Base.gone")


def test_yaml_that_cannot_be_parsed_is_missing(acme: SourceTree):
    (acme.roots["acme"] / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(NotFound, match=r"broken\.yaml cannot be parsed: while parsing a flow sequence"):
        acme.yaml("acme/broken.yaml")


def test_installed_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch, acme: SourceTree):
    monkeypatch.syspath_prepend(tmp_path)
    tree = SourceTree.installed("acme", "acme_that_is_not_there")
    assert tree.roots == {"acme": tmp_path / "acme"}


def test_modules_are_searched_for_a_word(acme: SourceTree):
    assert [name for name, _ in acme.modules_with("acme", "helper")] == ["acme.deep", "acme.star"]
    assert list(acme.modules_with("acme", "nowhere")) == []
