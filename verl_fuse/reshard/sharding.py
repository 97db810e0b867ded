"""Describes a layout of a model's parameters: the owners of each part, and the place of each part in a rank's own
tensors.

Invariants (tests/unit/reshard/test_shardings.py), for every layout:
- `cells` and `tensors` agree: a rank's pieces are exactly the cells it owns;
- every element of a parameter has an owner, and the pieces of a rank's tensors do not overlap.

Ranks here count from 0 within the layout; `PlacedSharding` maps them to ranks of the transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl_fuse.errors import FuseError
from verl_fuse.reshard.parameters import ModelParameters, Parameter

Owners = tuple[int, ...]


@dataclass(frozen=True)
class Cells:
    """A parameter cut into a grid: `rows` and `columns` are the cuts, first 0, last the end; `owners[i][j]` has the
    ranks that hold the cell.

    Rows may go beyond the parameter's own rows: padding of the vocabulary, moved where both sides have it. No owner: no
    rank here has the cell.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    owners: tuple[tuple[Owners, ...], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a parameter in a local tensor: its first element lies at `offset` of the flat tensor, its rows are
    `stride` elements apart."""

    parameter: str
    row: int
    rows: int
    column: int
    columns: int
    offset: int
    stride: int


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of one rank, under the name its framework gives it. Elements that no piece covers are padding."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Sharding(Protocol):
    """A division of parameters over `devices` ranks."""

    @property
    def devices(self) -> int: ...

    def check(self, weights: ModelParameters) -> None:
        """Refuse, with a FuseError, a model that this layout cannot divide."""
        ...

    def cells(self, weights: ModelParameters, parameter: Parameter) -> Cells:
        """Return the owners of a parameter; the same object for parameters that are split alike among the same
        ranks."""
        ...

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        """Return the tensors that one rank holds."""
        ...


@dataclass(frozen=True)
class PlacedSharding:
    """A layout on ranks of the transfer: rank i of the layout is `ranks[i]`."""

    sharding: Sharding
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.sharding.devices or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise FuseError(
                f"layout {self.sharding}: ranks={list(self.ranks)}; needs {self.sharding.devices} different ranks >= 0"
            )

    @classmethod
    def at(cls, sharding: Sharding, first: int = 0) -> "PlacedSharding":
        """Return the layout on consecutive ranks."""
        return cls(sharding, tuple(range(first, first + sharding.devices)))

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        """Return the tensors of rank `rank` of the transfer; none if the rank has no part in this layout."""
        return self.sharding.tensors(weights, self.ranks.index(rank)) if rank in self.ranks else ()

    def __str__(self) -> str:
        return f"{self.sharding} on {ranks_text(self.ranks)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: 0-3 where consecutive, else 0,2,5."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def even_cuts(size: int, parts: int) -> tuple[int, ...]:
    """Return cuts of `size` into equal parts."""
    return tuple(size * part // parts for part in range(parts + 1))


def merged(cuts: Sequence[int], owners: Sequence[Owners]) -> tuple[tuple[int, ...], tuple[Owners, ...]]:
    """Return cuts and owners without empty parts, and without cuts between parts of the same owners."""
    kept, found = [cuts[0]], []
    for begin, end, ranks in zip(cuts, cuts[1:], owners, strict=False):
        if begin == end:
            continue
        if found and found[-1] == ranks:
            kept[-1] = end
        else:
            kept.append(end)
            found.append(ranks)
    return tuple(kept), tuple(found)


def by_rows(parameter: Parameter, cuts: Sequence[int], owners: Sequence[Owners]) -> Cells:
    """Return the cells of a parameter that is split by rows."""
    rows, ranks = merged(cuts, owners)
    return Cells(rows, (0, parameter.columns), tuple((each,) for each in ranks))


def by_columns(parameter: Parameter, cuts: Sequence[int], owners: Sequence[Owners]) -> Cells:
    """Return the cells of a parameter that is split by columns."""
    columns, ranks = merged(cuts, owners)
    return Cells((0, parameter.rows), columns, (ranks,))
