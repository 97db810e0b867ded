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

from ci.long import __main__ as long
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


def behind(folder: Path, files: Collection[str]) -> set[str]:
    return collected(folder, files, long=True) - collected(folder, files, long=False)


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


@pytest.fixture(scope="module")
def long_tests(readers: set[str]) -> set[str]:
    return behind(REPO, readers)


def test_every_test_behind_the_variable_is_in_one_part(long_tests: set[str], items: list[str]):
    assert len(long_tests) > 42, "rows of pairs alone"
    assert not_once(long_tests, items) == {}


def test_a_file_of_which_the_variable_changes_a_test_is_in_one_part_as_a_whole(readers: set[str], items: list[str]):
    """Some tests do more with it under the same id. Of the pairs' file rows are in parts."""
    assert {path for path in readers if not Path(path).name.startswith("test_")} == set()
    assert sorted(item for item in items if ROWS not in item) == sorted(readers - {PAIRS})


def test_every_row_of_the_pairs_is_in_one_part(items: list[str]):
    rows = [test for item in items if ROWS in item for test in selected(item)]
    table = of_pairs("table")
    assert rows == [f"{PAIRS}::test_a_row_holds[{table.described(row)}]" for row in table.rows()]


def test_what_selects_an_item_is_collected(readers: set[str], items: list[str]):
    tests = collected(REPO, readers, long=True)
    chosen = {test for item in items for test in selected(item)}
    assert {
        one for one in chosen if one not in tests and not any(test.startswith(f"{one}::") for test in tests)
    } == set()


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
    new = behind(tmp_path, ["test_new.py"])
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
    assert REPO / upload["path"] == long.REPORTS


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
    monkeypatch.setattr(long, "PARTS", file)
    return file


def test_without_a_part_all_are_listed_with_what_was_measured(two: Path, capsys: pytest.CaptureFixture[str]):
    assert main([""]) == main([]) == 0
    assert capsys.readouterr().out == LISTED * 2


@pytest.mark.parametrize("part", ["0", "3", "02", "all", "1 2"])
def test_a_part_that_is_not_there_is_refused_with_the_list(part: str, two: Path, capsys: pytest.CaptureFixture[str]):
    assert main([part]) == USAGE
    assert capsys.readouterr().err == f"ci.long: PART={part}: allowed are 1 to 2\n{LISTED}"


def test_make_hands_the_part_on(repo: Path):
    for words, said in (("", "PART=1: "), ("PART=none", "ci.long: PART=none: allowed are 1 to ")):
        command = [
            "make",
            "--old-file=.venv/.setup-done",
            f"BIN={Path(sys.executable).parent}",
            "test-long",
            *words.split(),
        ]
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
        assert (done.stdout + done.stderr).startswith(said)
        assert done.returncode == (USAGE if words else 0)


@pytest.mark.parametrize("rows", ["0-3", "40-47", "3-2"])
def test_rows_that_the_table_does_not_have_are_refused(rows: str):
    with pytest.raises(FuseError, match=rf"{ROWS}{rows}: the table of pairs has the rows 1 to 46"):
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
