"""Every test behind VERL_FUSE_LONG is in one part of ci/long/parts.json, and only what passed is recorded."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import yaml

from ci.long import __main__ as module
from ci.long.__main__ import PARTS, ROWS, USAGE, Part, belongs, main, measured, of_pairs, read, selected
from verl_fuse.errors import FuseError

REPO = Path(__file__).resolve().parents[2]
VARIABLE = "VERL_FUSE_LONG"
PAIRS = "tests/integration/pairs/test_pairs.py"
HOUR = 3600
# Prints the ids of the tests that a run would not skip by a mark.
COLLECT = """
import sys, pytest
from _pytest.skipping import evaluate_skip_marks

class Plugin:
    def pytest_collection_finish(self, session):
        print(*("RUNS " + item.nodeid for item in session.items if not evaluate_skip_marks(item)), sep="\\n")

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Plugin()]))
"""


def parts() -> list[Part]:
    return json.loads(PARTS.read_text())


def collected(folder: Path, files: Collection[str], *, long: bool) -> set[str]:
    """Return the ids of the tests of `files` that run with the variable, or without it."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", COLLECT, *sorted(files)]
    found = subprocess.run(
        command, cwd=folder, env=environment | ({VARIABLE: "1"} if long else {}), capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return set(re.findall(r"^RUNS (.+)$", found.stdout, re.MULTILINE))


def not_once(tests: Collection[str], items: Sequence[str]) -> dict[str, list[str]]:
    """By test, the items that it is in, unless that is one."""
    homes = {test: [item for item in items if belongs(test, item)] for test in tests}
    return {test: home for test, home in homes.items() if len(home) != 1}


@pytest.fixture(scope="module")
def items() -> list[str]:
    return [item for part in parts() for item in part]


@pytest.fixture(scope="module")
def readers() -> set[str]:
    """The files of tests that read the variable, this one apart."""
    found = [path for path in (REPO / "tests").rglob("*.py") if path != Path(__file__) and VARIABLE in path.read_text()]
    return {str(path.relative_to(REPO)) for path in found}


def test_every_test_behind_the_variable_is_in_one_part(items: list[str]):
    tests = collected(REPO, ["tests/integration"], long=True)
    behind = tests - collected(REPO, ["tests/integration"], long=False)
    assert len(behind) > 42, "rows of pairs alone"
    assert not_once(behind, items) == {}
    assert {row for item in items if ROWS in item for row in selected(item)} <= tests


def test_a_file_of_which_the_variable_changes_a_test_is_in_one_part_as_a_whole(readers: set[str], items: list[str]):
    """Some tests do more with it under the same id. Of the pairs' file rows are in parts."""
    assert {path for path in readers if not path.startswith("tests/integration/")} == set()
    assert sorted(item for item in items if ROWS not in item) == sorted(readers - {PAIRS})


def test_every_row_of_the_pairs_is_in_one_part(items: list[str]):
    rows = [test for item in items if ROWS in item for test in selected(item)]
    table = of_pairs("table")
    assert rows == [f"{PAIRS}::test_a_row_holds[{table.described(row)}]" for row in table.rows()]


LONG_TESTS = """
import os
import pytest
WHOLE = bool(os.environ.get("VERL_FUSE_LONG"))
LONG = pytest.mark.skipif(not WHOLE, reason="VERL_FUSE_LONG=1")
@LONG
def test_whole(): pass
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=LONG)])
def test_one_value(size): pass
@pytest.mark.parametrize("loss", ["a", "b"] if WHOLE else ["a"])
def test_more_values(loss): pass
"""


def test_a_new_long_test_that_is_in_no_part_is_found(tmp_path: Path, items: list[str]):
    (tmp_path / "test_new.py").write_text(LONG_TESTS)
    new = collected(tmp_path, ["test_new.py"], long=True) - collected(tmp_path, ["test_new.py"], long=False)
    assert new == {"test_new.py::test_whole", "test_new.py::test_one_value[4]", "test_new.py::test_more_values[b]"}
    assert not_once(new, items) == {test: [] for test in new}
    assert not_once(new, [*items, "test_new.py"]) == {}
    assert not_once(["test_new.py::test_whole"], ["test_new.py"] * 2) == {
        "test_new.py::test_whole": ["test_new.py"] * 2
    }


def test_no_part_that_was_measured_took_more_than_an_hour():
    seconds = [[one["seconds"] for one in part.values() if one] for part in parts()]
    assert [sum(part) for part in seconds if sum(part) > HOUR] == []


def test_the_workflow_runs_every_part_each_within_an_hour():
    (job,) = yaml.safe_load((REPO / ".github/workflows/long.yml").read_text())["jobs"].values()
    assert job["strategy"] == {"fail-fast": False, "matrix": {"part": list(range(1, len(parts()) + 1))}}
    assert job["timeout-minutes"] * 60 <= HOUR
    (upload,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact")]
    assert REPO / upload["path"] == module.REPORTS


A, B, C = "tests/test_a.py", "tests/test_b.py", "tests/test_c.py"
TWO: list[Part] = [{A: {"seconds": 61, "day": "2026-11-20"}, B: None}, {C: {"seconds": 7, "day": "2026-11-21"}}]
LISTED = """PART=1: not measured as a whole
  tests/test_a.py: 61 s on 2026-11-20
  tests/test_b.py: not measured
PART=2: 7 s
  tests/test_c.py: 7 s on 2026-11-21
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of parts that are A and B, and C."""
    file = tmp_path / "parts.json"
    file.write_text(json.dumps(TWO))
    monkeypatch.setattr(module, "PARTS", file)
    return file


def test_without_a_part_all_are_listed_with_what_was_measured(two: Path, capsys: pytest.CaptureFixture[str]):
    assert main([""]) == main([]) == 0
    assert capsys.readouterr().out == LISTED * 2


@pytest.mark.parametrize("part", ["0", "3", "02", "all", "1 2"])
def test_a_part_that_is_not_there_is_refused_with_the_list(part: str, two: Path, capsys: pytest.CaptureFixture[str]):
    assert main([part]) == USAGE
    assert capsys.readouterr().err == f"ci.long: PART={part}: allowed are 1 to 2\n{LISTED}"


@pytest.mark.parametrize("words", [[], ["PART=5"]])
def test_make_hands_the_part_on(words: list[str], repo: Path):
    # What a make that runs this test sets is not meant for this one.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    command = ["make", "--dry-run", "test-long", *words]
    said = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == f'.venv/bin/python -m ci.long "{"5" if words else ""}"'


@pytest.mark.parametrize("rows", ["0-3", "40-68", "3-2"])
def test_rows_that_the_table_does_not_have_are_refused(rows: str):
    with pytest.raises(FuseError, match=rf"{ROWS}{rows}: the table of pairs has the rows 1 to 67"):
        selected(f"{PAIRS}{ROWS}{rows}")


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Path]:
    """Write a report of pytest's form: tests by file with their seconds, and what is said of one that did not pass."""

    def write(**tests: list[tuple[str, float, str]]) -> Path:
        cases = [
            f'<testcase classname="tests.test_{file}" name="{name}" time="{seconds}">{said}</testcase>'
            for file, found in tests.items()
            for name, seconds, said in found
        ]
        path = tmp_path / "part-1.xml"
        start = '<testsuites><testsuite timestamp="2026-11-26T23:10:00+00:00">'
        path.write_text(f"{start}{''.join(cases)}</testsuite></testsuites>")
        return path

    return write


def test_what_passed_is_recorded_and_other_items_keep_their_seconds(reported: Callable[..., Path]):
    day, tests = read(reported(b=[("test_one", 1.4, ""), ("test_two[x, y]", 2.3, "")]))
    assert sorted(tests) == ["tests/test_b.py::test_one", "tests/test_b.py::test_two[x, y]"]
    assert measured(TWO, tests, day) == ([{**TWO[0], B: {"seconds": 4, "day": "2026-11-26"}}, TWO[1]], [])


@pytest.mark.parametrize("fault", ["<failure/>", "<error/>", '<skipped message="no vLLM"/>'])
def test_an_item_of_which_a_test_did_not_pass_keeps_its_seconds_and_is_named(fault: str, reported: Callable[..., Path]):
    day, tests = read(reported(a=[("test_one", 9.0, ""), ("test_two", 9.0, fault)], c=[("test_one", 3.6, "")]))
    assert measured(TWO, tests, day) == ([TWO[0], {C: {"seconds": 4, "day": "2026-11-26"}}], [A])


def test_rows_of_which_some_are_not_in_the_report_are_not_recorded(reported: Callable[..., Path]):
    item = f"{PAIRS}{ROWS}1-2"
    one, two = selected(item)
    day, tests = read(reported(a=[("test_one", 9.0, "")]))
    (case,) = tests.values()
    assert measured([{item: None}], {one: case}, day) == ([{item: None}], [item])
    assert measured([{item: None}], {one: case, two: case}, day) == ([{item: {"seconds": 18, "day": day}}], [])


@pytest.mark.parametrize("text", ["", "<testsuites/>", "<testsuites><testsuite/></testsuites>", "{}"])
def test_a_file_that_is_no_report_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "part-1.xml"
    path.write_text(text)
    assert main(["--add", str(path)]) == USAGE
    assert f"{path} is no report of `python -m ci.long PART`" in capsys.readouterr().err


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Return what makes a repository with one part of one file of tests, runs the part and adds its report: the exit
    codes."""
    monkeypatch.setattr(module, "REPO", tmp_path)
    monkeypatch.setattr(module, "REPORTS", tmp_path / "runs/long")
    monkeypatch.setattr(module, "PARTS", tmp_path / "parts.json")
    (tmp_path / "README.md").write_text((REPO / "tests/integration/pairs/README.md").read_text())
    monkeypatch.setattr(of_pairs("report"), "README", tmp_path / "README.md")
    (tmp_path / "parts.json").write_text('[{"test_tiny.py": null}]')

    def make(test: str) -> list[int]:
        (tmp_path / "test_tiny.py").write_text(
            f"import json, os, pytest\ndef test_tiny(record_property):\n    {test}\n"
        )
        return [main(["1"]), main(["--add", str(tmp_path / "runs/long/part-1.xml")])]

    return make


ROW = {
    "row": "critic=first",
    "figures": {
        **{"samples": 48, "expected": 48, "missing": 0, "duplicated": 0, "gap": 1e-5, "stock_gap": 1e-5},
        **{"computed": float("nan"), "learned": 2e-7, "migrations": 0, "streamed": 0},
    },
    "faults": [],
    "seconds": 39.2,
}


def test_a_part_that_passed_is_recorded_with_its_rows(tiny: Callable[[str], list[int]], tmp_path: Path):
    assert tiny(f"assert os.environ['{VARIABLE}'] == '1'; record_property('row', {json.dumps(ROW)!r})") == [0, 0]
    ((item, one),) = json.loads((tmp_path / "parts.json").read_text())[0].items()
    assert (item, one) == ("test_tiny.py", {"seconds": 0, "day": one["day"]})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", one["day"])
    cells = of_pairs("report").cells_by_row((tmp_path / "README.md").read_text())
    assert cells["critic=first"] == f"48/48 | 0, 0 | 1.0e-05, 1.0e-05 | – | 2.0e-07 | 0 | 0 | 39 | holds | {one['day']}"


@pytest.mark.parametrize(
    ("test", "codes"),
    [
        ("pytest.skip('no vLLM')", [1, 1]),
        ("raise AssertionError", [1, 1]),
        # No report tells of the tests that did not run any more.
        ("raise KeyboardInterrupt", [2, USAGE]),
    ],
)
def test_a_part_of_which_a_test_did_not_pass_is_not_recorded(
    tiny: Callable[[str], list[int]], tmp_path: Path, test: str, codes: list[int]
):
    (tmp_path / "runs/long").mkdir(parents=True)
    (tmp_path / "runs/long/part-1.xml").write_text("an older report")
    assert tiny(test) == codes
    assert json.loads((tmp_path / "parts.json").read_text()) == [{"test_tiny.py": None}]
