"""Describes the layout of vLLM: tensor-parallel replicas, with the names and fused projections of its model classes.

Sources: vLLM 0.24 and 0.28 `QKVParallelLinear`, `MergedColumnParallelLinear`, `VocabParallelEmbedding` (rows padded to
a multiple of 64), `FusedMoE` (`w13_weight`, `w2_weight`, every expert cut over the tensor ranks).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from verl_fuse.errors import FuseError
from verl_fuse.reshard.local import (
    Entry,
    collected,
    column_block,
    head_rows,
    row_block,
    shape_of,
    tensor_parallel_cells,
)
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import Cells, LocalTensor, Owners, Piece
from verl_fuse.spec.layout import Layout

VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class VllmSharding:
    """`replicas` engines of `tp` ranks each; ranks count tensor ranks first."""

    tp: int
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.replicas < 1:
            raise FuseError(f"layout {self}: needs tp >= 1 and replicas >= 1")

    @property
    def devices(self) -> int:
        return self.tp * self.replicas

    def check(self, weights: ModelParameters) -> None:
        Layout(tp=self.tp).check(weights.model)
        if _padded(weights) % self.tp or weights.model.shared_intermediate % self.tp:
            raise FuseError(
                f"layout {self} for {weights.model.name}: needs a divisor of the padded vocabulary, "
                f"{_padded(weights)}, "
                f"and of shared_intermediate={weights.model.shared_intermediate}"
            )

    def cells(self, weights: ModelParameters, parameter: Parameter) -> Cells:
        heads = head_rows(weights.model, self.tp, "stacked") if parameter.kind in ("query", "key", "value") else ()
        padded = _padded(weights) if parameter.kind in ("embedding", "head") else parameter.rows
        return _cells(self, Parameter("", parameter.rows, parameter.columns, parameter.kind), padded, heads)

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        tp = rank % self.tp
        return collected(entry for p in weights.parameters for entry in self._entries(weights, p, tp))

    def _entries(self, weights: ModelParameters, parameter: Parameter, tp: int) -> Iterator[Entry]:
        columns, model = parameter.columns, weights.model
        prefix, _, last = parameter.name.rpartition(".")
        if parameter.kind in ("embedding", "head"):
            share = _padded(weights) // self.tp
            first, end = min(tp * share, parameter.rows), min((tp + 1) * share, parameter.rows)
            # A rank with nothing but padding has the tensor too.
            yield parameter.name, (share, columns), row_block(parameter, first, end - first)
        elif parameter.kind in ("query", "key", "value"):
            parts = [part for part in head_rows(model, self.tp, "stacked") if part.rank == tp]
            shape = shape_of(parameter, sum(part.rows for part in parts), columns)
            for part in parts:
                if part.kind == parameter.kind:
                    name = f"{prefix[:-6]}qkv_proj.{last}"
                    yield name, shape, row_block(parameter, part.row, part.rows, part.local)
        elif parameter.expert is not None:
            yield self._expert(weights, parameter, parameter.expert, tp)
        elif parameter.kind == "column":
            share = parameter.rows // self.tp
            before = share if prefix.endswith(".up_proj") else 0
            name = f"{prefix.rpartition('.')[0]}.gate_up_proj.weight"
            yield name, (2 * share, columns), row_block(parameter, tp * share, share, before)
        elif parameter.kind == "row":
            share = columns // self.tp
            yield parameter.name, (parameter.rows, share), column_block(parameter, tp * share, share)
        else:
            yield parameter.name, shape_of(parameter, parameter.rows, columns), row_block(parameter, 0, parameter.rows)

    def _expert(self, weights: ModelParameters, parameter: Parameter, expert: int, tp: int) -> Entry:
        experts = weights.model.experts
        prefix = parameter.name.partition(f"experts.{expert}.")[0] + "experts."
        if parameter.kind == "row":
            share = parameter.columns // self.tp
            at = expert * parameter.rows * share
            piece = Piece(parameter.name, 0, parameter.rows, tp * share, share, at, share)
            return prefix + "w2_weight", (experts, parameter.rows, share), piece
        share = parameter.rows // self.tp
        before = 2 * expert * share + (share if parameter.name.endswith(".up_proj.weight") else 0)
        shape = (experts, 2 * share, parameter.columns)
        return prefix + "w13_weight", shape, row_block(parameter, tp * share, share, before)

    def __str__(self) -> str:
        return f"vllm tp{self.tp}" + (f" dp{self.replicas}" if self.replicas > 1 else "")


def _padded(weights: ModelParameters) -> int:
    return -(-weights.model.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@lru_cache(maxsize=4096)
def _cells(layout: VllmSharding, parameter: Parameter, padded: int, heads: tuple) -> Cells:
    def owners(tensor_ranks: tuple[int, ...]) -> Owners:
        return tuple(tp + layout.tp * replica for replica in range(layout.replicas) for tp in tensor_ranks)

    return tensor_parallel_cells(parameter, padded, layout.tp, heads, owners)
