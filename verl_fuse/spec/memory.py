"""Describes the memory of training ranks, for code that decides which other memory fits beside them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One training rank and one model that it trains; in bytes, unless another unit is given.

    `host_free` of the host memory of `node` are free, `device` is all memory of the rank's device (None: its device is
    the host). The model has `parameters` of so many elements each, and `outputs` per token. Of its shard, which has
    `shard` bytes, and of the optimizer's moments `kept` stay on the device between two calls; `awaited` are moments
    that come to host memory with the first step. Ray's object store of the node may hold `store` bytes (None: unknown).

    A rank of a pipeline (Megatron) has its `stage`. Its `parameters` are the parameters of that stage alone, in the
    part of one tensor-parallel rank, each expert there is one of them; `second_head` elements has its second copy of a
    tied head, which is no parameter. It leaves `left` bytes of a step's weights for others.
    """

    node: str
    host_free: int
    device: int | None
    parameters: tuple[int, ...]
    outputs: int
    shard: int
    kept: int
    awaited: int
    store: int | None = None
    stage: int | None = None
    second_head: int = 0
    left: int = 0
