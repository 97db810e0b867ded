"""Fixtures shared by all tests."""

import atexit
import functools
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RUNS = "runs of recipes"
EXIT_STATUS = pytest.StashKey[int]()
REPO = Path(__file__).resolve().parent.parent
# A call of Ray without a cluster is an error, instead of the start of one that nobody ends.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


@pytest.fixture(scope="module", autouse=True)
def no_lane_outlives_its_tests() -> Iterator[None]:
    """Fail where a lane's thread is left: the interpreter's exit would cut it off in the middle of its work."""
    yield
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("verl-fuse lane")]
    assert not alive, f"lanes that nobody closed: {alive}"


def pytest_configure() -> None:
    """A process started in the background by a shell without job control ignores Ctrl-C, and so do its children: tests
    of Ctrl-C need one that does not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first: runs of recipes, then every other test that drives real parts."""
    items.sort(key=lambda item: (_share(item.nodeid) != RUNS, item.get_closest_marker("integration") is None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests out over two processes: all runs of recipes in a row, which build on each other, and every
    other module as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _share(nodeid)

    return Scheduling(config, log)


def _share(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    return RUNS if _runs_recipes(module) else module


@functools.cache
def _runs_recipes(module: str) -> bool:
    text = (REPO / module).read_text()
    return any(name in text for name in ("verl_home", "verl_runs"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without tearing down the native libraries, where Ray was loaded into this process.

    Threads of its gRPC outlive `ray.shutdown()` (event_engine, gcs_client_io_s, timer_manager): one that runs into the
    C++ destructors of a normal exit is a segmentation fault after the last test, and a verdict that depends on luck.
    """
    if "ray" in sys.modules and EXIT_STATUS in config.stash:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


@pytest.fixture
def repo() -> Path:
    """The repository root."""
    return REPO


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution that offers one plugin: a module and the metadata pip would write, on
    `sys.path` for one test."""
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


@pytest.fixture
def documented_keys(repo: Path) -> dict[str, set[str]]:
    """Command -> the keys of its `--json` by the README of the command line."""
    readme = (repo / "verl_fuse/cli/README.md").read_text()
    items = re.findall(r"^- `([a-z -]+)`: (`.*(?:\n  .*)*)$", readme, re.MULTILINE)
    return {command: set(re.findall(r"`([a-z_]+)`", keys)) for command, keys in items}
