"""Finds the ranks that have an element and the ranks that want it: both layouts cut each parameter into cells, whose
common refinement tells both.

Invariants (tests/unit/reshard/test_parts.py):
- the atoms of a parameter tile the part that the target layout holds, each element once;
- all atoms of a stream are held by one group of ranks and wanted by another; no two streams have the same two groups;
- a parameter that the target wants and no rank holds is a FuseError naming it; padding of the vocabulary may have no
holder, and is then left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_fuse.errors import FuseError
from verl_fuse.reshard.order import order_of
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import Cells, PlacedSharding
from verl_fuse.spec.arrays import Ints

NOBODY = 0


@dataclass(frozen=True)
class Streams:
    """`groups`: sets of ranks in order of node and rank, number 0 is the empty set. Stream k has the atoms `first[k]`
    to `first[k + 1]`, is held by group `source[k]`, wanted by `target[k]`, and is `size[k]` elements long. Atom
    a is the rectangle (`row`, `rows`, `column`, `columns`) of a parameter; read row by row it is the stream's
    elements from `offset[a]` on."""

    groups: tuple[tuple[int, ...], ...]
    source: Ints
    target: Ints
    size: Ints
    first: Ints
    parameter: NDArray[np.int32]
    row: NDArray[np.int32]
    rows: NDArray[np.int32]
    column: NDArray[np.int32]
    columns: NDArray[np.int32]
    offset: Ints

    def __len__(self) -> int:
        return len(self.size)


def streams_of(
    weights: ModelParameters, source: PlacedSharding, target: PlacedSharding, nodes: Sequence[int]
) -> Streams:
    """Return the streams between two layouts; `nodes[r]` is the node of rank r."""
    groups = _Groups(nodes)
    grids: dict[tuple[int, int], tuple[Ints, ...]] = {}
    tables, places = [], []
    for place, parameter in enumerate(weights.parameters):
        have, want = source.sharding.cells(weights, parameter), target.sharding.cells(weights, parameter)
        key = id(have), id(want)
        if key not in grids:
            grids[key] = _grid(have, want, groups.ids(source, have), groups.ids(target, want))
        grid = grids[key]
        _check_held(parameter, grid, source, target)
        tables.append(grid)
        places.append(np.full(len(grid[0]), place, np.int64))
    row, rows, column, columns, held, wanted = (np.concatenate(arrays) for arrays in zip(*tables, strict=True))
    atoms = np.stack([np.concatenate(places), row, rows, column, columns]).astype(np.int32)
    keep = (wanted != NOBODY) & (held != NOBODY)
    pair = (held * len(groups.sets) + wanted)[keep]
    atoms = atoms[:, keep]
    order = order_of(pair, len(groups.sets) ** 2)
    pair, atoms = pair[order], atoms[:, order]
    keys, first = np.unique(pair, return_index=True)
    ends = np.cumsum(atoms[2].astype(np.int64) * atoms[4])
    starts = ends - atoms[2].astype(np.int64) * atoms[4]
    first = np.append(first, len(pair))
    base = np.append(starts, ends[-1:])[first]
    return Streams(
        groups=tuple(groups.sets),
        source=keys // len(groups.sets),
        target=keys % len(groups.sets),
        size=np.diff(base),
        first=first,
        parameter=atoms[0],
        row=atoms[1],
        rows=atoms[2],
        column=atoms[3],
        columns=atoms[4],
        offset=starts - np.repeat(base[:-1], np.diff(first)),
    )


class _Groups:
    """Numbers for sets of ranks."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._numbers: dict[tuple[int, ...], int] = {(): NOBODY}
        self._seen: dict[tuple[int, tuple[int, ...]], int] = {}
        self.sets: list[tuple[int, ...]] = [()]

    def ids(self, placed: PlacedSharding, cells: Cells) -> Ints:
        """Return the group of each cell."""
        return np.array([[self._id(placed, owners) for owners in line] for line in cells.owners], np.int64)

    def _id(self, placed: PlacedSharding, owners: tuple[int, ...]) -> int:
        key = id(placed), owners
        if key not in self._seen:
            ranks = tuple(sorted((placed.ranks[rank] for rank in owners), key=lambda rank: (self._nodes[rank], rank)))
            number = self._numbers.setdefault(ranks, len(self.sets))
            if number == len(self.sets):
                self.sets.append(ranks)
            self._seen[key] = number
        return self._seen[key]


def _grid(have: Cells, want: Cells, held: Ints, wanted: Ints) -> tuple[Ints, ...]:
    """Return (row, rows, column, columns, holding group, wanting group) of the atoms of one parameter; elements that
    the target lacks are left out."""
    row_cuts, column_cuts = _refined(have.rows, want.rows), _refined(have.columns, want.columns)
    held = _spread(held, have, row_cuts, column_cuts)
    wanted = _spread(wanted, want, row_cuts, column_cuts)
    row, column = np.meshgrid(row_cuts[:-1], column_cuts[:-1], indexing="ij")
    rows, columns = np.meshgrid(np.diff(row_cuts), np.diff(column_cuts), indexing="ij")
    return tuple(array.ravel() for array in (row, rows, column, columns, held, wanted))


def _refined(have: tuple[int, ...], want: tuple[int, ...]) -> Ints:
    """Return all cuts up to the target's end."""
    cuts = np.union1d(np.array(have, np.int64), np.array(want, np.int64))
    return cuts[cuts <= want[-1]]


def _spread(groups: Ints, cells: Cells, row_cuts: Ints, column_cuts: Ints) -> Ints:
    """Return the group of each atom; no holder beyond the last cut."""
    framed = np.full((groups.shape[0] + 1, groups.shape[1] + 1), NOBODY, np.int64)
    framed[:-1, :-1] = groups
    rows = np.searchsorted(np.array(cells.rows), row_cuts[:-1], "right") - 1
    columns = np.searchsorted(np.array(cells.columns), column_cuts[:-1], "right") - 1
    return framed[np.ix_(rows, columns)]


def _check_held(parameter: Parameter, grid: tuple[Ints, ...], source: PlacedSharding, target: PlacedSharding) -> None:
    row, _, _, _, held, wanted = grid
    missing = (held == NOBODY) & (wanted != NOBODY) & (row < parameter.rows)
    if missing.any():
        raise FuseError(
            f"parameter {parameter.name!r}: row {row[missing][0]} is wanted by {target} and held by nobody in {source}"
        )
