"""Every command of a README, of the guides and of the plugins' READMEs runs, or all but the training itself does.

`pip install` and `verl-fuse doctor` are run by tests/integration/test_wheel.py and test_doctor.py, `make demo` by CI,
benches by whoever measures: here their names and options are looked up.
"""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_fuse.cli import trials
from verl_fuse.cli.ab import plan_runs
from verl_fuse.cli.group import build
from verl_fuse.cli.main import GROUPS, SUBCOMMANDS
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import plan
from verl_fuse.timeline.files import record_step
from verl_fuse.tune.trial import Outcome

REPO = Path(__file__).resolve().parents[2]
sys.path.extend(str(REPO / "tests/unit" / folder) for folder in ("compare", "timeline"))
PAGES = (
    "README.md", "SUPPORTED.md", "SECURITY.md", ".github/CONTRIBUTING.md", "ci/README.md",
    *sorted(str(path.relative_to(REPO)) for path in (REPO / "ci/docs/pages").glob("*.md")),
    *sorted(
        str(path.relative_to(REPO))
        for folder in ("verl_fuse", "plugins", "patches", "recipes")
        for path in (REPO / folder).rglob("README.md")
    ),
)  # fmt: skip
INSTALLS = {
    "pip install 'verl-fuse[verl]'", "pip install 'verl-fuse[verl,megatron]'", "pip install 'verl-fuse[plot]'",
    "pip install 'verl-fuse[solver]'",
    "pip install '.[verl]'", "pip install --dry-run verl-fuse",
    "pip install -e '.[verl,cpu,megatron,plot,dev]'", "pip install verl-fuse",
    # What a plugin of somebody else is installed with, and how the lists of ci/stacks are made.
    "pip install .", "pip install --no-deps", "pip freeze", "pip freeze --all --exclude-editable",
}  # fmt: skip
# In a command: an argument that the reader may leave out.
OPTIONAL = {"[overrides]", "[hydra", "overrides]"}
# Commands that would measure this machine or solve for long, if they were not only asked for their options.
LOOKED_UP = {"profile", "schedule"}
# A module or a script, with what it is called by; the rest of the line are its arguments.
PYTHON = re.compile(r"(?:\.venv/bin/)?python (?:-m )?(\S+)(.*)")
TESTS = re.compile(r"(?:\w+=\S+ )?(?:\.venv/bin/python -m )?pytest (.*)")


def commands(text: str) -> set[str]:
    """Of code blocks of a shell, and of words in code."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for _, block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    found = (line.split("  #")[0].strip() for line in lines)
    return {
        line
        for line in found
        if re.match(r"(verl-fuse|make|pip) \S", line) or PYTHON.fullmatch(line) or TESTS.fullmatch(line)
    }


ALL = sorted({command for page in PAGES for command in commands((REPO / page).read_text())})
SCRIPTS = [each for each in ALL if PYTHON.fullmatch(each) and not TESTS.fullmatch(each)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return inputs by their names in READMEs: two runs to compare, a recorded run, a workload, a cluster."""
    from made_runs import step_records, write_run
    from synthetic import synthetic_timeline

    folder = tmp_path_factory.mktemp("given")
    base = write_run(folder / "base", step_records(1))
    fused = write_run(folder / "fused", step_records(2, fused=True, seconds=4.0))
    for step in (1, 2):
        record_step(folder / "recorded", synthetic_timeline(step=step))
    workload = folder / "workload.yaml"
    workload.write_text((REPO / "verl_fuse/cli/examples/workload.yaml").read_text())
    script = folder / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n")
    files = {
        **dict.fromkeys(("step.yaml", "WORKLOAD.yaml"), str(workload)),
        **dict.fromkeys(("run.sh", "run_grpo.sh"), str(script)),
    }
    made = {name: str(folder / name) for name in ("plan.json", "OUT")}
    runs = {"BASE": str(base), "FUSED": str(fused), "RUN_DIR": str(folder / "recorded")}
    return {**runs, **files, **made, "CLUSTER": "h100x2", "NAME": "ppo-cpu", "ARGUMENTS": "trainer.nnodes=1"}


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_there_are_commands():
    assert len(ALL) > 60
    assert {"make demo", "verl-fuse ab grpo-cpu fuse.preset=fast", "verl-fuse compare BASE FUSED"} <= set(ALL)


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("make ")])
def test_a_target_is_there_and_so_is_its_bench(command: str):
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    words = shlex.split(command)
    assert set(word for word in words[1:] if "=" not in word) <= set(targets)
    benches = [word.partition("=")[2] for word in words if word.startswith("BENCH=") and word != "BENCH=name"]
    assert [name for name in benches if not (REPO / f"ci/bench/{name}.py").exists()] == []
    stacks = [word.partition("=")[2] for word in words if word.startswith("STACK=") and word != "STACK=..."]
    assert [name for name in stacks if not (REPO / f"ci/stacks/{name}").is_dir()] == []


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_module_is_there_and_has_its_options(command: str):
    name, rest = PYTHON.fullmatch(command).groups()
    if name == "ci.bench.<name>":
        return
    assert (REPO / name).is_file() if name.endswith(".py") else find_spec(name) is not None
    if options := options_of(shlex.split(rest)):
        called = [sys.executable, *([] if name.endswith(".py") else ["-m"]), name, "--help"]
        said = subprocess.run(called, capture_output=True, text=True, check=True, cwd=REPO).stdout
        assert options <= set(re.findall(r"--[\w-]+", said))


@pytest.mark.parametrize("command", [each for each in ALL if TESTS.fullmatch(each)])
def test_tests_that_are_named_are_found(command: str):
    words = shlex.split(TESTS.fullmatch(command)[1])
    asked = [sys.executable, "-m", "pytest", *words, "--collect-only", "--quiet", "-p", "no:cacheprovider"]
    found = subprocess.run(asked, capture_output=True, text=True, cwd=REPO)
    assert found.returncode == 0, found.stdout
    assert "::" in found.stdout


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("pip ")])
def test_an_install_is_one_that_is_tested(command: str):
    assert command in INSTALLS


@pytest.mark.parametrize("command", [each for each in ALL if each.startswith("verl-fuse ")])
def test_a_command_runs(command: str, given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name, *words = [word for word in shlex.split(command)[1:] if word not in OPTIONAL]
    arguments = [given.get(word, word) for word in words]
    assert name in SUBCOMMANDS
    if name == "example":
        # It writes where it is called.
        monkeypatch.chdir(tmp_path)
    # Set by `plan` for the process that it is about to start.
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    if name in ("run", "ab") and arguments:
        recipe, overrides = find_recipe(arguments[0]), arguments[1:]
        planned = (
            plan_runs(recipe, overrides, tmp_path).values()
            if name == "ab"
            else [plan(recipe, overrides, baseline=False, home=tmp_path)]
        )
        assert all(run.run_dir for run in planned)
        return
    if name == "tune" and arguments:
        # Its options are read, and the trial of the base is planned.
        monkeypatch.setattr(trials, "make_task", lambda launch: None)
        monkeypatch.setattr(trials, "outcome", lambda launch, limit: Outcome("crashed", reason=str(launch.run_dir)))
        result = CliRunner().invoke(build(GROUPS), [name, *arguments])
        assert result.exit_code == 1, result.output
        return
    of_reader = "--policy" in arguments
    if of_reader or name in LOOKED_UP or len(arguments) == len(options_of(arguments)):
        # Named alone, with options at most, or with a module that the reader writes.
        at = [name, *(arguments[:1] if name == "schedule" else ())]
        said = CliRunner().invoke(build(GROUPS), [*at, "--help"], env={"COLUMNS": "200"})
        assert said.exit_code == 0, said.output
        assert options_of(arguments) <= set(re.findall(r"--[\w-]+", said.output))
        return
    if name == "plan":
        arguments += ["--time-limit", "2"]
    if name == "simulate" and words[0] == "h100":
        arguments[1:1] = ["--seeds", "1"]
    result = CliRunner().invoke(build(GROUPS), [name, *arguments])
    assert result.exit_code == 0, result.output
    assert result.output


@pytest.mark.parametrize(
    ("variable", "recipe", "steps"), [("DEMO", "grpo-cpu", 16), ("DEMO_REAL", "grpo-smollm2-cpu", 4)]
)
def test_a_demo_s_runs_are_accepted(
    variable: str, recipe: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    makefile = (REPO / "Makefile").read_text().replace("\\\n", " ")
    (settings,) = re.findall(rf"^{variable} := (.*)", makefile, re.MULTILINE)
    assert f"ab {recipe} $({variable}) " in makefile
    runs = plan_runs(find_recipe(recipe), settings.split(), tmp_path, "both")
    assert [run.config.trainer.total_training_steps for run in runs.values()] == [steps] * 3
    assert "fuse.preset=fast" in shlex.join(runs["fused"].command)
