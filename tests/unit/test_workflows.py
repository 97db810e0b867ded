"""Everything that the workflows run exists: make targets, modules, files, and the arguments they are given."""

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml

from ci.long.__main__ import PARTS
from ci.upstream.__main__ import COMMANDS
from ci.upstream.ab.command import parse

REPO = Path(__file__).resolve().parents[2]
WORKFLOWS = REPO / ".github/workflows"
# Tools of the runner itself.
SHELL = {"git", "test"}
# Virtual environments that the Makefile makes.
VENVS = (".venv/bin/", ".venv-verl/bin/")


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def commands(path: Path) -> Iterator[str]:
    """Every line that a workflow runs, continued lines joined, with the values of each job of a matrix."""
    for job in load(path)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in product(*matrix.values()):
            for step in job["steps"]:
                text = step.get("run", "").replace("\\\n", " ")
                for name, value in zip(matrix, values, strict=True):
                    text = text.replace(f"${{{{ matrix.{name} }}}}", str(value))
                yield from text.splitlines()


def problem(command: str, repo: Path) -> str | None:
    """Return the missing part of the command, or None."""
    program, *rest = shlex.split(command)
    tool = next((program.removeprefix(venv) for venv in VENVS if program.startswith(venv)), None)
    if program == "make":
        return make_problem(rest, (repo / "Makefile").read_text())
    if tool == "python":
        module = rest[rest.index("-m") + 1]
        if importlib.util.find_spec(module) is None:
            return f"no module {module}"
        missing = [word for word in rest if word.startswith("tests/") and not (repo / word).exists()]
        return f"no {missing}" if missing else None
    if program in SHELL or tool == "verl-fuse" or (repo / program).exists():
        return None
    return f"no {program}"


def make_problem(words: list[str], makefile: str) -> str | None:
    targets = [word for word in words if "=" not in word]
    missing = [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    if missing:
        return f"no target {missing}"
    for variable, value in (word.split("=", 1) for word in words if "=" in word):
        if f"$({variable})" not in makefile:
            return f"no target uses {variable}"
        if variable == "STACK" and not (REPO / "ci/stacks" / value).is_dir():
            return f"no stack {value}"
        if variable == "PART" and value not in map(str, range(1, len(json.loads(PARTS.read_text())) + 1)):
            return f"no part {value}"
        if variable == "UPSTREAM":
            name, *arguments = value.split()
            if name not in COMMANDS:
                return f"no command {name}"
            if name == "ab":
                parse(arguments)
    return None


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_everything_a_workflow_runs_exists(path: Path, repo: Path):
    assert {command: fault for command in commands(path) if (fault := problem(command, repo))} == {}


@pytest.mark.parametrize(
    "command",
    [
        "make nosuch",
        "make test NOSUCH=1",
        "make test STACK=nosuch",
        "make test-long PART=0",
        "make test-long PART=${{ matrix.nosuch }}",
        "make upstream UPSTREAM=nosuch",
        ".venv/bin/python -m nosuch",
        ".venv/bin/python -m pytest tests/nosuch.py",
        "ci/nosuch",
    ],
)
def test_what_does_not_exist_is_found(command: str, repo: Path):
    assert problem(command, repo)


def test_each_workflow_starts_when_it_should():
    # PyYAML reads the key `on` as true.
    starts = {path.stem: load(path)[True] for path in WORKFLOWS.glob("*.yml")}
    assert starts == {
        "ci": {"push": {"branches": ["main"]}, "pull_request": None},
        "nightly": {"schedule": [{"cron": "17 2 * * *"}], "workflow_dispatch": None},
        "long": {"schedule": [{"cron": "29 4 * * 6"}], "workflow_dispatch": None},
        "canary": {"schedule": [{"cron": "43 3 * * 1"}], "workflow_dispatch": None},
        "release": {"push": {"tags": ["v*"]}},
    }


def test_every_workflow_may_only_read():
    for path in WORKFLOWS.glob("*.yml"):
        workflow = load(path)
        assert workflow["permissions"] == {"contents": "read"}, path
        more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
        assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {}), path


def test_reports_are_uploaded_from_where_they_are_written():
    for name in ("nightly", "canary"):
        for job in load(WORKFLOWS / f"{name}.yml")["jobs"].values():
            if not any("make upstream" in step.get("run", "") for step in job["steps"]):
                continue
            (upload,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact")]
            assert upload["with"]["path"] == f"{parse([]).output}/"
            assert upload["if"] == "${{ !cancelled() }}"


def test_what_a_cache_depends_on_is_there():
    steps = [step for path in WORKFLOWS.glob("*.yml") for job in load(path)["jobs"].values() for step in job["steps"]]
    named = {step["with"]["cache-dependency-path"] for step in steps if "cache" in step.get("with", {})}
    assert named == {"ci/stacks/*/*.txt"}
    assert len(list(REPO.glob(*named))) == 4
