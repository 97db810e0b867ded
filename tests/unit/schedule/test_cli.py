"""`verl-fuse schedule` end to end, without a subprocess."""

import dataclasses
import json
import signal
import subprocess
import sys

import pytest
from problems import two_ranks
from typer.testing import CliRunner

from verl_fuse.cli.main import main
from verl_fuse.cli.schedule import app
from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import METHODS, solve
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule

RUN = CliRunner()


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(two_ranks(2).to_json())
    return path


def test_solve_and_show(problem_file, tmp_path):
    out = tmp_path / "schedule.json"
    solved = RUN.invoke(app, ["solve", str(problem_file), "--time-limit", "2", "--out", str(out)])
    assert solved.exit_code == 0, solved.output
    schedule = Schedule.read(out)
    assert (schedule.method, schedule.makespan, schedule.optimal) == ("portfolio", 12.0, True)
    shown = RUN.invoke(app, ["show", str(out)])
    assert "rank   1 |" in shown.output
    page = tmp_path / "schedule.html"
    assert RUN.invoke(app, ["show", str(out), "--out", str(page)]).exit_code == 0
    assert page.stat().st_size > 1000


def test_a_place_that_cannot_be_written_is_refused_before_solving(problem_file, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_fuse.cli.schedule.solve", lambda *_: pytest.fail("solved first"))
    result = RUN.invoke(app, ["solve", str(problem_file), "--out", str(tmp_path / "nodir" / "x.json")])
    assert isinstance(result.exception, FuseError)
    assert "nodir/x.json: cannot be written" in str(result.exception)


def test_compare_lists_every_method(problem_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = RUN.invoke(app, ["compare", str(problem_file), "--time-limit", "0.2"])
    assert result.exit_code == 0, result.output
    assert all(method in result.output for method in METHODS)


def test_ctrl_c_ends_the_comparison_with_what_is_known(problem_file, monkeypatch, capsys):
    def interrupted(problem, method, budget):
        if method == "annealed":
            signal.raise_signal(signal.SIGINT)
        return solve(problem, method, budget)

    monkeypatch.setattr("verl_fuse.cli.schedule.solve", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["schedule", "compare", str(problem_file), "--json"])
    said = capsys.readouterr()
    assert end.value.code == 130
    assert [row["method"] for row in json.loads(said.out)["methods"]] == list(METHODS)[:3]
    assert said.err == "verl-fuse: interrupted\n"


def test_methods_share_the_time_limit(problem_file, monkeypatch):
    given = []

    def counted(problem, method, budget):
        given.append(budget.seconds)
        return solve(problem, "serial", budget)

    monkeypatch.setattr("verl_fuse.cli.schedule.solve", counted)
    assert RUN.invoke(app, ["compare", str(problem_file), "--time-limit", "6"]).exit_code == 0
    assert given[0] == pytest.approx(1.0, abs=0.2)
    assert given[-1] <= 6.0


def test_numbers_have_units(problem_file, tmp_path):
    known = dataclasses.replace(two_ranks(2, memory_limit=3.0), time_unit="s", memory_unit="B")
    (tmp_path / "known.json").write_text(known.to_json())
    for file, units in (
        (problem_file, ("12 units of time", "units of memory")),
        (tmp_path / "known.json", ("s", "GiB")),
    ):
        out = RUN.invoke(app, ["compare", str(file), "--time-limit", "0.6"]).stdout
        assert all(unit in " ".join(out.split()) for unit in units)
    assert ScheduleProblem.read(tmp_path / "known.json") == known
    assert "unit" not in problem_file.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "microbatches=0"),
        ({"ranks": [0, 0]}, "two stages on rank 0"),
        ({"ranks": [0, 7]}, "unknown rank 7"),
        ({"forward": -1}, "forward=-1"),
        ({"forward": float("nan")}, "forward=nan"),
        ({"microbatches": 10**6}, "at most 200000"),
    ],
)
def test_bad_input_is_one_message_that_names_the_file(problem_file, capsys, change, message):
    data = json.loads(problem_file.read_text())
    data["pipelines"][0] |= change
    problem_file.write_text(json.dumps(data))
    with pytest.raises(SystemExit) as exit_:
        main(["schedule", "solve", str(problem_file)])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"verl-fuse: {problem_file}: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_tampered_schedule_is_refused(problem_file, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    RUN.invoke(app, ["solve", str(problem_file), "--method", "greedy", "--out", str(out)])
    out.write_text(out.read_text().replace('"microbatch": 1', '"microbatch": 0', 1))
    with pytest.raises(SystemExit):
        main(["schedule", "show", str(out)])
    assert "appears twice" in capsys.readouterr().err


def test_a_bad_problem_is_refused_before_solver_and_compiler_are_imported(problem_file):
    problem_file.write_text(problem_file.read_text().replace('"ranks": 2', '"ranks": 0', 1))
    script = f"""
import sys
from verl_fuse.cli.main import main
try:
    main(["schedule", "solve", {str(problem_file)!r}])
except SystemExit as exit_:
    print(exit_.code, sorted({{"ortools", "numba", "pandas"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "2 []\n"


def test_without_or_tools_annealing_solves_and_exact_says_what_it_lacks(problem_file, tmp_path):
    script = f"""
import sys
sys.modules["ortools"] = None
from verl_fuse.cli.main import main
for arguments in (
    ["solve", {str(problem_file)!r}, "--time-limit", "5"],
    ["compare", {str(problem_file)!r}, "--time-limit", "3", "--json"],
    ["solve", {str(problem_file)!r}, "--method", "exact"],
):
    try:
        main(["schedule", *arguments])
    except SystemExit as exit_:
        print("exit", exit_.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("exit 0") == 2
    assert done.stdout.endswith("exit 2\n")
    assert "annealing alone: pip install 'verl-fuse[solver]'" in done.stderr
    assert "method='exact': needs OR-tools (pip install 'verl-fuse[solver]')" in done.stderr
    found = json.loads(done.stdout.split("exit 0\n")[1])["methods"]
    assert [one["method"] for one in found] == ["serial", "back-to-back", "greedy", "annealed", "portfolio"]
    assert found[-1]["makespan"] <= min(one["makespan"] for one in found)
