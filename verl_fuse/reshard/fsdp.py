"""Describes the layout of FSDP2: every parameter is cut along its first dimension; HSDP repeats the cut parameters; one
shard is a replicated model.

Experts are stacked, like in `transformers` 5 (`experts.gate_up_proj`, `experts.down_proj`), so the first dimension
is the expert. Source: `torch.distributed.fsdp.fully_shard` (torch.chunk: equal parts rounded up, so the last ranks may
have fewer rows, or none).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from verl_fuse.errors import FuseError
from verl_fuse.reshard.local import Entry, collected, row_block, shape_of
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import Cells, LocalTensor, Owners, by_rows


@dataclass(frozen=True)
class FsdpSharding:
    """`replicas` copies of the model, each cut into `shards`; ranks count shards first."""

    shards: int
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.shards < 1 or self.replicas < 1:
            raise FuseError(f"layout {self}: needs shards >= 1 and replicas >= 1")

    @property
    def devices(self) -> int:
        return self.shards * self.replicas

    def check(self, weights: ModelParameters) -> None:
        """Raise a FuseError unless every parameter can be cut along its first dimension."""

    def cells(self, weights: ModelParameters, parameter: Parameter) -> Cells:
        if parameter.expert is not None:
            shard = parameter.expert // _share(weights.model.experts, self.shards)
            return _whole(parameter.rows, parameter.columns, self._owners(shard))
        return _cells(parameter.rows, parameter.columns, self.shards, self.replicas)

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        return collected(entry for p in weights.parameters for entry in self._entries(weights, p, rank % self.shards))

    def _entries(self, weights: ModelParameters, parameter: Parameter, shard: int) -> Iterator[Entry]:
        if parameter.expert is not None:
            yield from self._expert(weights, parameter, parameter.expert, shard)
            return
        share = _share(parameter.rows, self.shards)
        first, last = min(shard * share, parameter.rows), min((shard + 1) * share, parameter.rows)
        if last > first:
            shape = shape_of(parameter, last - first, parameter.columns)
            yield parameter.name, shape, row_block(parameter, first, last - first)

    def _expert(self, weights: ModelParameters, parameter: Parameter, expert: int, shard: int) -> Iterator[Entry]:
        experts = weights.model.experts
        share = _share(experts, self.shards)
        if expert // share != shard:
            return
        count, local = min(share, experts - shard * share), expert % share
        prefix, _, projection = parameter.name.removesuffix(".weight").partition(f"experts.{expert}.")
        rows = parameter.rows if projection == "down_proj" else 2 * parameter.rows
        stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
        before = local * rows + (parameter.rows if projection == "up_proj" else 0)
        shape = (count, rows, parameter.columns)
        yield f"{prefix}experts.{stacked}", shape, row_block(parameter, 0, parameter.rows, before)

    def _owners(self, shard: int) -> Owners:
        return tuple(shard + self.shards * replica for replica in range(self.replicas))

    def __str__(self) -> str:
        if self.shards == 1:
            return f"replicated {self.replicas}"
        return f"fsdp {self.shards}" if self.replicas == 1 else f"fsdp {self.replicas}x{self.shards}"


def _share(rows: int, shards: int) -> int:
    """Return the rows of a full shard."""
    return -(-rows // shards)


@lru_cache(maxsize=4096)
def _cells(rows: int, columns: int, shards: int, replicas: int) -> Cells:
    cuts = tuple(min(shard * _share(rows, shards), rows) for shard in range(shards + 1))
    owners = [tuple(shard + shards * replica for replica in range(replicas)) for shard in range(shards)]
    return by_rows(Parameter("", rows, columns, "whole"), cuts, owners)


@lru_cache(maxsize=4096)
def _whole(rows: int, columns: int, owners: Owners) -> Cells:
    return Cells((0, rows), (0, columns), ((owners,),))
