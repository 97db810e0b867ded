"""Fixtures shared by all tests."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def repo() -> Path:
    """The repository root."""
    return REPO


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution that offers one plugin: a module and the metadata pip would write, on `sys.path` for one test."""
    modules: list[str] = []

    def install(name: str, source: str, *, distribution: str = "acme-fuse", value: str | None = None) -> None:
        module = f"{distribution.replace('-', '_')}_{name.replace('-', '_')}"
        modules.append(module)
        site = tmp_path / distribution
        metadata = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[verl_fuse]\n{name} = {value or module}\n")
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)
