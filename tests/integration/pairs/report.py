"""The table of pairs as Markdown: factors, rows with the figures of their runs, what is
refused and what is not tried."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from covering import all_pairs, covering_rows
from judging import Figures
from table import ALWAYS, EXCLUDED, FACTORS, LATER, NAMES, REFUSED, default_row, described, refused_pairs

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


def kept_rows(new: str, old: str) -> str:
    """The table `new`, in which a row that was not run has the result that it has in `old`."""
    known = {line.split(" | ")[0]: line for line in old.splitlines() if line.startswith("| ")}

    def line_of(line: str) -> str:
        name, _, cells = line.partition(" | ")
        return known.get(name, line) if set(cells) <= set(f"{NOT_RUN} |") and NOT_RUN in cells else line

    return "".join(f"{line_of(line)}\n" for line in new.splitlines())


def markdown(results: Mapping[str, tuple[Figures, Sequence[str], float]]) -> str:
    """`results`: figures, faults and seconds by a row's description."""
    table = rows()
    refused = refused_pairs()
    lines = [
        (
            f"{len(NAMES)} factors, {sum(map(len, NAMES.values()))} values, {len(all_pairs(NAMES))} pairs: "
            f"{len(refused)} are refused before start, the others are covered by {len(table)} rows. The first value of "
            "a factor is that of rows that do not name it."
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
        *(f"| {described(row)} | {_figures(results.get(described(row)))} |" for row in table),
    ]
    return "\n".join(lines) + "\n"


def _figures(result: tuple[Figures, Sequence[str], float] | None) -> str:
    if result is None:
        return " | ".join([NOT_RUN] * 9)
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
