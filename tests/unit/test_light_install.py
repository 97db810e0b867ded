"""The base install plans, simulates and draws: everything but the host side imports without torch, ray or verl."""

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "verl", "transfer_queue", "vllm", "megatron", "tensordict", "transformers", "hydra")

# Refuses heavy imports outright; a guarded `try: import torch` would still be seen in sys.modules on a full install.
IMPORT_ALL = """
import importlib, json, sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] in HEAVY:
            raise ImportError(f"{fullname} is not part of the base install")

HEAVY, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Refuse())
faults = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        faults[module] = str(error)
print(json.dumps(faults))
"""


def light_modules() -> list[str]:
    """All modules but the host side; of the host side, what must work before verl is there."""
    plugins = ("verl_fuse_elastic", "verl_fuse_interstage", "verl_fuse_observe")
    folders = {"verl_fuse": REPO, **dict.fromkeys(plugins, REPO / "plugins")}
    paths = [(root, path) for package, root in folders.items() for path in sorted((root / package).rglob("*.py"))]
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for root, path in paths]
    heavy = ("verl_fuse.host.", "verl_fuse.runtime.", "verl_fuse_elastic.standalone.", "verl_fuse_interstage.slices.")
    light = [name for name in names if not name.startswith(heavy)]
    return [
        *light,
        "verl_fuse_cpu.entry",
        "verl_fuse_cpu.plugin",
        *(f"verl_fuse_pipeline.{name}" for name in ("plugin", "policy", "schedules", "report")),
        *(f"verl_fuse_{name}.plugin" for name in ("placement", "realloc", "speculation", "update")),
        "verl_fuse.host.entry",
        "verl_fuse.host.start.inspect",
    ]


def faults_of(modules: list[str]) -> dict[str, str]:
    """Return the faults that keep each of these modules from being imported in a process without heavy packages."""
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps([HEAVY, modules])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def test_everything_but_the_host_side_imports_without_torch_ray_or_verl():
    modules = light_modules()
    assert {"verl_fuse", "verl_fuse.hookspecs", "verl_fuse.plugins", "verl_fuse.cli.main", "verl_fuse_observe"} <= set(
        modules
    )
    assert faults_of(modules) == {}


def test_the_check_can_fail():
    assert faults_of(["json", "torch.nn"]) == {"torch.nn": "torch is not part of the base install"}
