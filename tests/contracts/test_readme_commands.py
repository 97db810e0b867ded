"""Every command of the README, the guides and the plugins' READMEs: it runs, or all but the training itself does.

`pip install` and `verl-fuse doctor` are run by tests/integration/test_wheel.py and test_doctor.py, `make demo` by CI.
"""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_fuse.cli.ab import plan_both
from verl_fuse.cli.group import build
from verl_fuse.cli.main import SUBCOMMANDS
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import plan
from verl_fuse.timeline.files import record_step

REPO = Path(__file__).resolve().parents[2]
sys.path.extend(str(REPO / "tests/unit" / folder) for folder in ("compare", "timeline"))
PAGES = (
    "README.md", "verl_fuse/README.md", ".github/CONTRIBUTING.md",
    *sorted(str(path.relative_to(REPO)) for path in (REPO / "plugins").rglob("README.md")),
)  # fmt: skip
INSTALLS = {"pip install 'verl-fuse[verl]'", "pip install '.[verl]'", "pip install .", "pip install verl-fuse"}
# Commands that are named alone, or with what a reader puts in.
PLACEHOLDERS = {"WORKLOAD.yaml", "CLUSTER", "NAME", "[overrides]", "plan.json"}


def commands(text: str) -> set[str]:
    """Of code blocks of a shell, and of words in code."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    found = (line.split("  #")[0].strip() for line in lines)
    return {line for line in found if re.match(r"(verl-fuse|make|pip|python -m|\.venv/bin/python -m) \S", line)}


ALL = sorted({command for page in PAGES for command in commands((REPO / page).read_text())})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two recorded runs, by the names that READMEs have for them."""
    from made_runs import step_records, write_run
    from synthetic import synthetic_timeline

    folder = tmp_path_factory.mktemp("runs")
    base = write_run(folder / "base", step_records(1))
    fused = write_run(folder / "fused", step_records(2, fused=True, seconds=4.0))
    for step in (1, 2):
        record_step(folder / "recorded", synthetic_timeline(step=step))
    return {"BASE": str(base), "FUSED": str(fused), "RUN_DIR": str(folder / "recorded")}


def test_there_are_commands():
    assert len(ALL) > 20
    assert {"make demo", "verl-fuse ab grpo-cpu fuse.preset=fast", "verl-fuse compare BASE FUSED"} <= set(ALL)


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("make ")])
def test_a_target_is_there_and_so_is_its_bench(command: str):
    targets = re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    words = shlex.split(command)
    assert set(word for word in words[1:] if "=" not in word) <= set(targets)
    benches = [word.partition("=")[2] for word in words if word.startswith("BENCH=") and word != "BENCH=name"]
    assert [name for name in benches if not (REPO / f"ci/bench/{name}.py").exists()] == []


@pytest.mark.parametrize("command", [each for each in ALL if "python -m " in each])
def test_a_module_is_there(command: str):
    module = command.split("python -m ")[1].split()[0]
    assert find_spec(module) is not None


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("pip ")])
def test_an_install_is_one_that_is_tested(command: str):
    assert command in INSTALLS


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("verl-fuse ")])
def test_a_command_runs(command: str, runs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name, *arguments = [runs.get(word, word) for word in shlex.split(command)[1:]]
    assert name in SUBCOMMANDS
    # Set by `plan` for the process that it is about to start.
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    if name in ("run", "ab") and arguments and arguments[0] not in PLACEHOLDERS:
        recipe, overrides = find_recipe(arguments[0]), arguments[1:]
        planned = (
            plan_both(recipe, overrides, tmp_path)
            if name == "ab"
            else [plan(recipe, overrides, baseline=False, home=tmp_path)]
        )
        assert all(run.run_dir for run in planned)
    elif arguments and not PLACEHOLDERS & set(arguments):
        result = CliRunner().invoke(build(SUBCOMMANDS), [name, *arguments])
        assert result.exit_code in (0, 1), result.output
        assert result.output


def test_the_demo_s_runs_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    makefile = (REPO / "Makefile").read_text()
    (demo,) = re.findall(r"^DEMO := (.*)", makefile.replace("\\\n", " "), re.MULTILINE)
    stock, fused = plan_both(find_recipe("grpo-cpu"), demo.split(), tmp_path)
    assert (stock.steps, fused.steps) == (16, 16)
    assert "fuse.preset=fast" in shlex.join(fused.command)
