"""A feature is deleted by deleting its plugin's folder: without it the rest is found, composes, and is checked as
before. That no module imports another plugin's is shown by test_structure.py."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from verl_fuse import plugins

REPO = Path(__file__).resolve().parents[2]
# Runs without the site module, so that an installed copy of the folder is not found either.
CODE = """
import json, sys
tree, gone, installed = sys.argv[1:]
sys.path[:0] = [tree, f"{tree}/plugins", f"{tree}/patches"]
sys.path.append(installed)
from verl_fuse import plugins
from verl_fuse.cli.composition import compose
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.errors import FuseError
from verl_fuse.host.start.settings import load_settings

def blocks(*overrides):
    return sorted(load_settings(compose(recipe, ["trainer.v1.trainer_mode=fuse", *overrides])).blocks)

recipe = find_recipe("grpo-fsdp2-8gpu")
found = {"features": {name: one.switch for name, one in plugins.features(plugins.load()).items()}}
for preset in ("observe", "safe", "fast"):
    found[preset] = blocks(f"fuse.preset={preset}")
try:
    blocks(f"++fuse.{gone}.a_key=1")
except FuseError as error:
    found["refused"] = error.args
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def switches() -> dict[str, str]:
    return {name: one.switch for name, one in plugins.features(plugins.load()).items()}


@pytest.mark.parametrize("name", plugins.BUILTIN)
def test_the_rest_works_without_the_folder_of_a_plugin(name: str, tmp_path: Path, switches: dict[str, str]):
    package = plugins.BUILTIN[name].partition(".")[0]
    for part in ("verl_fuse", "patches", "recipes"):
        (tmp_path / part).symlink_to(REPO / part)
    (tmp_path / "plugins").mkdir()
    for folder in (REPO / "plugins").iterdir():
        if folder.name != package:
            (tmp_path / "plugins" / folder.name).symlink_to(folder)
    command = [sys.executable, "-E", "-S", "-c", CODE, str(tmp_path), name, sysconfig.get_path("purelib")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    left = {one: switch for one, switch in switches.items() if not switch.startswith(f"{name}.")}
    assert found["features"] == left
    blocks = sorted(plugins.config_blocks(plugins.load()).keys() - {name})
    assert found["observe"] == found["safe"] == found["fast"] == blocks
    (refused,) = found["refused"]
    assert f"the plugin {name!r} is not installed" in refused
