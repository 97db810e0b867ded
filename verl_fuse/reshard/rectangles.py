"""Cuts the elements of a span into rectangles of parameters.

Invariants (tests/unit/reshard/test_parts.py):
- the rectangles of a span, read row by row one after the other, are its elements in order;
- a span that ends inside an atom has at most three rectangles of the atom: a part of a row, whole rows, a part of a
row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verl_fuse.reshard.program import StreamRange
from verl_fuse.reshard.streams import Streams


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of parameter number `parameter`; its elements come `at` elements after the beginning of the span."""

    parameter: int
    row: int
    rows: int
    column: int
    columns: int
    at: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def rectangles(streams: Streams, span: StreamRange) -> Iterator[Rectangle]:
    """Yield the rectangles of a span, in order."""
    first, last = int(streams.first[span.stream]), int(streams.first[span.stream + 1])
    atom = first + int(np.searchsorted(streams.offset[first:last], span.low, "right")) - 1
    low = span.low
    while low < span.high:
        columns = int(streams.columns[atom])
        begin = low - int(streams.offset[atom])
        end = min(span.high - int(streams.offset[atom]), int(streams.rows[atom]) * columns)
        for row, rows, column, width in _lines(begin, end, columns):
            yield Rectangle(
                int(streams.parameter[atom]),
                int(streams.row[atom]) + row,
                rows,
                int(streams.column[atom]) + column,
                width,
                low - span.low,
            )
            low += rows * width
        atom += 1


def _lines(begin: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, rows, column, columns) of the elements `begin` to `end` of a rectangle that is `columns` wide."""
    while begin < end:
        row, column = divmod(begin, columns)
        rows = (end - begin) // columns if column == 0 else 0
        if rows:
            yield row, rows, 0, columns
            begin += rows * columns
        else:
            width = min(columns - column, end - begin)
            yield row, 1, column, width
            begin += width
