"""Prints a table so that no number or name in it is cut."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000


def print_table(table: Table) -> None:
    """Where stdout is no terminal, as wide as the table needs; on a terminal that is narrower, cells are broken between words, and nowhere else."""
    console = Console()
    options = console.options.update(max_width=WIDEST)
    if not console.is_terminal:
        console.width = max(console.width, Measurement.get(console, options, table).maximum)
    for column in table.columns:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        column.min_width = max(cell.minimum for cell in cells)
        # Room is taken from columns that can be broken.
        column.no_wrap = column.min_width == max(cell.maximum for cell in cells)
    if Measurement.get(console, options, table).minimum > console.width:
        table.box, table.padding = None, (0, 1, 0, 0)
        console.width = max(console.width, Measurement.get(console, options, table).minimum)
    console.print(table, crop=False)
