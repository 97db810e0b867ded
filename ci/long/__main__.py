"""`python -m ci.long` lists the parts of the long tests, `python -m ci.long PART` runs one, and
`python -m ci.long --add REPORT...` records what the reports of such runs say: seconds in parts.json, rows in the table
of pairs.

Invariants (tests/unit/test_long_parts.py):
- every test that only VERL_FUSE_LONG=1 runs, every row of the table of pairs, and every file of which the variable
  changes a test, is in exactly one part;
- a test that was skipped has not passed;
- seconds are those of tests that all passed in one run.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import write_atomically

REPO = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).with_name("parts.json")
REPORTS = REPO / "runs/long"
# Between the file of the pairs' tests and the numbers of the first and the last row in the order of the table, from 1.
ROWS = " rows "
# Exit codes of pytest after which its report tells of every test: all passed, some failed.
WHOLE = (0, 1)
USAGE = 2
# Children of a test in the report, one of which a test has that did not pass.
NOT_PASSED = ("failure", "error", "skipped")

# By a file of tests, or some rows of the pairs' file: seconds and day of the last run in which all passed.
Part = Mapping[str, Mapping[str, Any] | None]
# What a report says of a test, by its id.
Cases = Mapping[str, ElementTree.Element]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.long", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("part", nargs="?", default="", metavar="PART")
    what.add_argument("--add", type=Path, nargs="+", default=[], metavar="REPORT")
    options = parser.parse_args(arguments)
    parts = json.loads(PARTS.read_text())
    try:
        if options.add:
            return add(parts, options.add)
        if not options.part:
            print(listed(parts))
            return 0
        if options.part not in map(str, range(1, len(parts) + 1)):
            raise FuseError(f"PART={options.part}: allowed are 1 to {len(parts)}\n{listed(parts)}")
        return run(parts[int(options.part) - 1], REPORTS / f"part-{options.part}.xml")
    except FuseError as error:
        print(f"ci.long: {error}", file=sys.stderr)
        return USAGE


def listed(parts: Sequence[Part]) -> str:
    """Return the parts with what is in each, and the seconds each took when it was last measured."""
    lines = []
    for number, part in enumerate(parts, start=1):
        seconds = [one["seconds"] for one in part.values() if one]
        total = f"{sum(seconds)} s" if len(seconds) == len(part) else "not measured as a whole"
        lines.append(f"PART={number}: {total}")
        for item, one in part.items():
            lines.append(f"  {item}: " + (f"{one['seconds']} s on {one['day']}" if one else "not measured"))
    return "\n".join(lines)


@cache
def selected(item: str) -> tuple[str, ...]:
    """Return what selects an item of a part in pytest: a file, or the ids of rows; a FuseError names rows that the
    table does not have."""
    file, rows, numbers = item.partition(ROWS)
    if not rows:
        return (file,)
    table = of_pairs("table")
    first, last = map(int, numbers.split("-"))
    every = tuple(f"{file}::test_a_row_holds[{table.described(row)}]" for row in table.rows())
    if not 1 <= first <= last <= len(every):
        raise FuseError(f"{PARTS}: {item}: the table of pairs has the rows 1 to {len(every)}")
    return every[first - 1 : last]


def of_pairs(module: str) -> ModuleType:
    """Return a module of tests/integration/pairs, which tests import by its bare name."""
    for folder in (REPO / "tests/integration/pairs", REPO / "tests/integration"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(module)


def belongs(test: str, item: str) -> bool:
    """Return whether a test, named by its id, is in an item of a part."""
    tests = selected(item)
    return test in tests or test.partition("::")[0] in tests


def run(part: Part, report: Path) -> int:
    """Run a part, write pytest's report of it, and return the exit code."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    tests = [test for item in part for test in selected(item)]
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--durations=20", *tests]
    code = subprocess.run(command, cwd=REPO, env={**os.environ, "VERL_FUSE_LONG": "1"}).returncode
    if code not in WHOLE:
        report.unlink(missing_ok=True)
        return code
    if skipped := [test for test, case in read(report)[1].items() if case.find("skipped") is not None]:
        print("Skipped, so that these did not run:", *skipped, sep="\n  ", file=sys.stderr)
    print(f"To record it: python -m ci.long --add {report.relative_to(REPO)}")
    return code or int(bool(skipped))


def read(report: Path) -> tuple[str, Cases]:
    """Return the day of pytest's report, and what it says of each test."""
    try:
        (suite,) = ElementTree.parse(report).getroot()
        tests = {f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": case for case in suite}
        return suite.attrib["timestamp"][:10], tests
    except (OSError, ElementTree.ParseError, ValueError, KeyError) as error:
        raise FuseError(f"{report} is no report of `python -m ci.long PART` ({error!r})") from error


def add(parts: Sequence[Part], reports: Sequence[Path]) -> int:
    """Record the reports; return 1 if an item of a part did not pass: it keeps its seconds."""
    left: list[str] = []
    rows = []
    for day, tests in map(read, reports):
        parts, faults = measured(parts, tests, day)
        left += faults
        found = [case.find("properties/property[@name='row']") for case in tests.values()]
        rows += [{**json.loads(row.attrib["value"]), "day": day} for row in found if row is not None]
    of_pairs("report").write(rows)
    write_atomically(PARTS, json.dumps(parts, indent=1) + "\n")
    print(listed(parts))
    if left:
        print("Not recorded, because not all of its tests passed in this run:", *left, sep="\n  ", file=sys.stderr)
    return int(bool(left))


def measured(parts: Sequence[Part], tests: Cases, day: str) -> tuple[list[Part], list[str]]:
    """Return the parts with the seconds of the items whose tests all passed, and the items of which some did not pass
    or some rows are not in the report."""
    left = []

    def of(item: str, before: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        ran = {test: case for test, case in tests.items() if belongs(test, item)}
        if not ran:
            return before
        absent = [test for test in selected(item) if "::" in test and test not in ran]
        if absent or any(case.find(fault) is not None for case in ran.values() for fault in NOT_PASSED):
            left.append(item)
            return before
        return {"seconds": round(sum(float(case.attrib["time"]) for case in ran.values())), "day": day}

    return [{item: of(item, before) for item, before in part.items()} for part in parts], left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
