"""Prints a table so that no number or name in it is cut.

Invariants (tests/unit/cli/test_tables.py):
- a column justified to the right holds numbers, and none of its cells is ever broken;
- a text column is broken between words where a break makes the table fit the terminal, or 100 columns in a pipe;
- a table that still does not fit is printed whole.
"""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

WIDEST = 10_000
# Columns of a page that is no terminal: a log, a file, a mail.
PAGE = 100


def page_width(console: Console) -> int:
    """Return the number of columns of the terminal, or of a page."""
    return console.width if console.is_terminal else PAGE


def numbers(*headers: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(header, justify="right") for header in headers]


def print_table(table: Table) -> None:
    """Print the table as wide as the terminal or the page, and wider where words and numbers do not fit."""
    console = Console()
    options = console.options.update(max_width=WIDEST)
    console.width = page_width(console)
    for column in table.columns:
        cells = [Measurement.get(console, options, cell) for cell in column.cells]
        header = Measurement.get(console, options, column.header)
        column.min_width = max(
            [header.minimum, *((c.maximum if column.justify == "right" else c.minimum) for c in cells)]
        )
        # Columns that can be broken give room; the header of a number may be broken.
        widest = max([header.maximum, *(c.maximum for c in cells)])
        column.no_wrap = column.min_width == widest
    if Measurement.get(console, options, table).minimum > console.width:
        table.box, table.padding = None, (0, 1, 0, 0)
        console.width = max(console.width, Measurement.get(console, options, table).minimum)
    console.print(table, crop=False)
