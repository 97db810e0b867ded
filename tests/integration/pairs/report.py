"""The table of pairs as Markdown: factors, rows with the figures of their runs, what is
refused and what is not tried."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from covering import all_pairs
from table import EXCLUDED, FACTORS, NAMES, REFUSED, described, refused_pairs, rows

README = Path(__file__).with_name("README.md")
WIDTH = 120
# Columns of a row beside its description.
COLUMNS = ("samples", "missing, twice", "gap, stock's", "computed", "learned", "moved", "streamed", "s", "verdict",
           "last passed")  # fmt: skip
# What a row that did not run shows.
NOT_RUN = "–"
# Between these lines of README.md the table is.
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


# What `test_a_row_holds` says of its run, with the day: the row's description, its figures (judging.py), its faults,
# and seconds.
Result = Mapping[str, Any]


def write(results: Iterable[Result]) -> None:
    """Write the table into README.md; a row without a result keeps what the table says of it."""
    head, _, rest = README.read_text().partition(BEGIN)
    table, _, foot = rest.partition(END)
    README.write_text(f"{head}{BEGIN}\n\n{markdown(results, cells_by_row(table))}\n{END}{foot}")


def markdown(results: Iterable[Result], before: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the table with `results`; a row without one shows the cells of `before`, and a row that does not hold the
    day of these on which it last passed."""
    cells = dict(before)
    for one in results:
        cells[one["row"]] = " | ".join(_cells(one, cells.get(one["row"], NOT_RUN)))
    table = rows()
    refused = refused_pairs()
    lines = [
        *wrap(
            f"{len(NAMES)} factors, {sum(map(len, NAMES.values()))} values, {len(all_pairs(NAMES))} pairs: "
            f"{len(refused)} are refused before start, the others are covered by {len(table)} rows. The first value of "
            "a factor is that of rows that do not name it.",
            WIDTH,
        ),
        "",
        "| factor | values |",
        "|---|---|",
        *(f"| {name} | {', '.join(values)} |" for name, values in FACTORS.items()),
        "",
        "| refused together | | the message names |",
        "|---|---|---|",
        *(
            f"| {one}: {', '.join(first)} | {other}: {', '.join(second)} | `{key}` |"
            for one, first, other, second, key in REFUSED
        ),
        "",
        "| not tried | reason |",
        "|---|---|",
        *(f"| `{what}` | {why} |" for what, why in EXCLUDED.items()),
        "",
        f"| row | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
        *(f"| {name} | {cells.get(name, ' | '.join([NOT_RUN] * len(COLUMNS)))} |" for name in map(described, table)),
    ]
    return "\n".join(lines) + "\n"


def cells_by_row(text: str) -> dict[str, str]:
    """Return the cells of a table that `markdown` made, by a row's description."""
    found = (line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.count(" | ") == len(COLUMNS))
    return {name: cells for name, cells in found}


def _cells(result: Result, before: str) -> tuple[str, ...]:
    found = result["figures"]
    return (
        f"{found['samples']}/{found['expected']}",
        f"{found['missing']}, {found['duplicated']}",
        f"{_number(found['gap'])}, {_number(found['stock_gap'])}",
        _number(found["computed"]),
        _number(found["learned"]),
        str(found["migrations"]),
        str(found["streamed"]),
        f"{result['seconds']:.0f}",
        "; ".join(result["faults"]).replace("|", "/") or "holds",
        before.split(" | ")[-1] if result["faults"] else result["day"],
    )


def _number(value: Any) -> str:
    return NOT_RUN if value is None or math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
