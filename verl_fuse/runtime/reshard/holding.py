"""Addresses a rank's tensors by rectangles of parameters.

Invariants (tests/unit/runtime/test_holding.py):
- the views of a rectangle lie in the rank's own tensors, tile the rectangle, and have its shape;
- tensors are exactly the layout's, by name and shape; a FuseError names the first that differs.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from verl_fuse.errors import FuseError
from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.rectangles import Rectangle
from verl_fuse.reshard.sharding import LocalTensor

# A piece of a parameter (row, rows, column, columns) with its elements.
Region = tuple[int, int, int, int, torch.Tensor]


class HeldTensors:
    """The tensors of a rank in a layout, which names them `locals_`; errors call them `where`."""

    def __init__(
        self, weights: ModelParameters, locals_: Sequence[LocalTensor], where: str, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        layout = {tensor.name: tensor for tensor in locals_}
        unknown = [name for name, tensor in tensors.items() if name not in layout and tensor.numel()]
        missing = [name for name in layout if name not in tensors]
        if unknown or missing:
            raise FuseError(
                f"{where}: tensors {_some(unknown)} are not part of the layout, {_some(missing)} of the layout are "
                "missing"
            )
        self._blocks: dict[int, list[Region]] = {}
        for name, local in layout.items():
            tensor = tensors[name].detach()
            if tuple(tensor.shape) != local.shape or not tensor.is_contiguous():
                raise FuseError(
                    f"{where}: tensor {name!r} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; needs "
                    f"{local.shape}, contiguous"
                )
            for piece in local.pieces:
                if piece.rows:
                    view = tensor.as_strided(
                        (piece.rows, piece.columns), (piece.stride, 1), tensor.storage_offset() + piece.offset
                    )
                    block = piece.row, piece.rows, piece.column, piece.columns, view
                    self._blocks.setdefault(weights.index[piece.parameter], []).append(block)
        self.layout = layout
        self.tensors = {name: tensors[name] for name in layout}

    @property
    def types(self) -> list[str]:
        """Return the names of the tensors' types."""
        return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()})

    def views(self, wanted: Rectangle) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (row, column, elements) of each part of a rectangle, counted from its corner."""
        found = 0
        for row, rows, column, columns, view in self._blocks.get(wanted.parameter, ()):
            top, bottom = max(row, wanted.row), min(row + rows, wanted.row + wanted.rows)
            left, right = max(column, wanted.column), min(column + columns, wanted.column + wanted.columns)
            if top < bottom and left < right:
                found += (bottom - top) * (right - left)
                yield (
                    top - wanted.row,
                    left - wanted.column,
                    view[top - row : bottom - row, left - column : right - column],
                )
        assert found == wanted.elements, f"{wanted} is not all held"


def check_apart(old: HeldTensors, new: HeldTensors) -> None:
    """Refuse tensors to be written that share memory with tensors to be read, unless both are the same tensor with the
    same content."""
    extents = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, side, name)
        for side, holding in enumerate((old, new))
        for name, tensor in holding.tensors.items()
    )
    furthest = extents[0] if extents else (0, 0, 0, "")
    for extent in extents[1:]:
        (_, end, side, name), (begin, _, other_side, other) = furthest, extent
        if begin < end and side != other_side:
            first, second = (old, new) if side == 0 else (new, old)
            pieces = first.layout[name].pieces, second.layout[other].pieces
            if extent[:2] != furthest[:2] or pieces[0] != pieces[1]:
                raise FuseError(f"tensor {other!r} shares memory with {name!r}, one to be read and one to be written")
        if extent[1] > end:
            furthest = extent


def _some(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    if not names:
        return "none"
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
