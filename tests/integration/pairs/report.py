"""The table of pairs as Markdown: factors, rows with the figures of their runs, what is
refused and what is not tried."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from covering import all_pairs, covering_rows
from judging import Figures
from table import ALWAYS, EXCLUDED, FACTORS, LATER, NAMES, REFUSED, default_row, described, refused_pairs

WIDTH = 120
# What a row that did not run shows.
NOT_RUN = "–"
# Between these lines of README.md the table is.
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def rows() -> list[dict[str, str]]:
    """The rows of the table: those that `make test` runs, then those that cover most; then those of the factors that
    joined later."""
    plain, refused = default_row(), refused_pairs()
    first = covering_rows({name: NAMES[name] for name in NAMES if name not in LATER}, refused, ALWAYS)
    known = [{**row, **{name: plain[name] for name in LATER}} for row in first]
    # Every other factor is at its first value: a row with all factors at others is too long to read.
    others = [name for name in NAMES if name not in LATER]
    halves = [{name: plain[name] for name in part} for part in (others[::2], others[1::2])]
    begun = [{**half, name: value} for name in LATER for value in NAMES[name][1:] for half in halves]
    return covering_rows(NAMES, refused, [*known, *begun])


def markdown(
    results: Mapping[str, tuple[Figures, Sequence[str], float]], before: Mapping[str, str] = MappingProxyType({})
) -> str:
    """`results`: figures, faults and seconds by a row's description; a row without shows the cells of `before`."""
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
        "| row | samples | missing, twice | gap, stock's | computed | learned | moved | streamed | s | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(f"| {name} | {_figures(results.get(name), before.get(name))} |" for name in map(described, table)),
    ]
    return "\n".join(lines) + "\n"


def cells_by_row(text: str) -> dict[str, str]:
    """Return the cells of a table that `markdown` made, by a row's description."""
    found = (line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.count(" | ") == 9)
    return {name: cells for name, cells in found}


def _figures(result: tuple[Figures, Sequence[str], float] | None, before: str | None) -> str:
    if result is None:
        return before or " | ".join([NOT_RUN] * 9)
    found, faults, seconds = result
    cells = (
        f"{found.samples}/{found.expected}",
        f"{found.missing}, {found.duplicated}",
        f"{_number(found.gap)}, {_number(found.stock_gap)}",
        _number(found.computed),
        _number(found.learned),
        str(found.migrations),
        str(found.streamed),
        f"{seconds:.0f}",
        "; ".join(faults).replace("|", "/") or "holds",
    )
    return " | ".join(cells)


def _number(value: Any) -> str:
    return NOT_RUN if value is None or math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
