"""A small distribution to patch, and patches of it."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_fuse.host.start.compat.fingerprint import fingerprint
from verl_fuse.host.upstream import on_import
from verl_fuse_patches import registry
from verl_fuse_patches.registry import Patch

UPSTREAM = "def greet():\n    return 'upstream'\n"


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", {})
    monkeypatch.setattr(registry, "_applied", set())
    # A refused patch keeps waiting for its module: not beyond its test.
    monkeypatch.setattr(on_import, "_callbacks", {})


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Iterator[Path]:
    """Distribution acme-lib 1.2.0 with one module, acme_lib.greeting; yields the module's file."""
    package = tmp_path / "acme_lib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "greeting.py").write_text(UPSTREAM)
    metadata = tmp_path / "acme_lib-1.2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-lib\nVersion: 1.2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield package / "greeting.py"
    for module in ("acme_lib.greeting", "acme_lib"):
        sys.modules.pop(module, None)


@pytest.fixture
def make_patch() -> Callable[..., Patch]:
    def make(**changes) -> Patch:
        def apply(module) -> None:
            original = module.greet
            module.greet = lambda: f"patched {original()}"

        values = {
            "name": "greeting",
            "reason": "it greets upstream",
            "upstream": "https://example.org/issues/7",
            "distributions": ("acme-lib",),
            "target": "acme_lib.greeting:greet",
            "fingerprints": {">=1.2,<1.3": fingerprint(ast.parse(UPSTREAM).body)},
            "remove_when": "it greets politely",
            "apply": apply,
        }
        return Patch(**(values | changes))

    return make
