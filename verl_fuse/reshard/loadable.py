"""Describes the layout of the part of a checkpoint that vLLM's ranks read: tensors with the names and shapes of a
checkpoint, of which a rank has only the part that it loads.

A rank's weight loaders take whole parameters and cut out their own part, so the rest may hold any values.

Invariants (tests/unit/reshard/test_loadable.py):
- a rank's pieces are the cells that vLLM's layout gives it, at their place in the whole parameter;
- a program to this layout moves the same elements as a program to vLLM's own layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_fuse.reshard.local import shape_of
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import Cells, LocalTensor, Piece
from verl_fuse.reshard.vllm import VllmSharding


@dataclass(frozen=True)
class LoadableSharding:
    """The ranks of `engines`, before their weight loaders."""

    engines: VllmSharding

    @property
    def devices(self) -> int:
        return self.engines.devices

    def check(self, weights: ModelParameters) -> None:
        self.engines.check(weights)

    def cells(self, weights: ModelParameters, parameter: Parameter) -> Cells:
        return self.engines.cells(weights, parameter)

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        return tuple(
            LocalTensor(p.name, shape_of(p, p.rows, p.columns), tuple(_pieces(p, self.cells(weights, p), rank)))
            for p in weights.parameters
        )

    def __str__(self) -> str:
        return f"loadable {self.engines}"


def _pieces(parameter: Parameter, cells: Cells, rank: int) -> Iterator[Piece]:
    for row, below, line in zip(cells.rows, cells.rows[1:], cells.owners, strict=False):
        for column, beside, owners in zip(cells.columns, cells.columns[1:], line, strict=False):
            if rank in owners:
                at = row * parameter.columns + column
                yield Piece(parameter.name, row, below - row, column, beside - column, at, parameter.columns)
