"""Fingerprints change with code and with nothing else."""

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_patches.fingerprint import fingerprint, source_path

SOURCE = """
import os

class Engine:
    def build(self, device):
        backend = f"cpu:gloo,{device}:{self.name}"
        if device:
            return backend
        return None

def other():
    return 1
"""

REFORMATTED = """
import os

class Engine:
  # Why a backend is needed.
  def build(self,
            device):
      backend = f"cpu:gloo,{device}:{self.name}"  # both halves

      if device:
          return backend
      return None

def other():
    return 2
"""


def test_a_known_function_has_a_known_fingerprint():
    assert fingerprint("def f(a):\n    return a\n", ("f",)) == "04fd958bd6e92226"


def test_comments_and_formatting_do_not_count():
    assert fingerprint(SOURCE, ("Engine.build",)) == fingerprint(REFORMATTED, ("Engine.build",))


def test_code_outside_the_named_function_does_not_count():
    assert fingerprint(SOURCE, ("other",)) != fingerprint(REFORMATTED, ("other",))
    assert fingerprint(SOURCE, ("Engine.build", "other")) != fingerprint(REFORMATTED, ("Engine.build", "other"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cpu:gloo", "cpu:mpi"),
        ("{device}:", "{ device}:"),
        ("if device", "if not device"),
        ("            return backend", "            pass\n        return backend"),
        ("def build(self, device)", "async def build(self, device)"),
        ("    def build", "    @staticmethod\n    def build"),
    ],
)
def test_every_change_of_code_counts(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert fingerprint(changed, ("Engine.build",)) != fingerprint(SOURCE, ("Engine.build",))


@pytest.mark.parametrize("qualname", ["missing", "Engine.missing", "other.inner"])
def test_what_is_not_there_is_named(qualname):
    with pytest.raises(FuseError, match=f"'{qualname}' is not defined"):
        fingerprint(SOURCE, (qualname,))


def test_files_are_found_without_importing_their_packages(tmp_path, monkeypatch):
    package = tmp_path / "acme_heavy"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "one.py", "inner/__init__.py"):
        (package / file).write_text("raise RuntimeError('imported')")
    (tmp_path / "acme_single.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_path("acme_heavy.one") == package / "one.py"
    assert source_path("acme_heavy.inner") == package / "inner" / "__init__.py"
    assert source_path("acme_single") == tmp_path / "acme_single.py"
    for module in ("acme_heavy.missing", "acme_missing"):
        with pytest.raises(FuseError, match=f"no source file for module '{module}'"):
            source_path(module)
