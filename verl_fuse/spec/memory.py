"""The memory of training ranks, for code that decides what else fits beside them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One training rank and one model that it trains; bytes, unless something else is said.

    `host_free` of the host memory of `node` are free, `device` is all memory of the rank's device (None: its device is
    the host). The model has `parameters` of so many elements each, and `outputs` per token. Of its shard, which has
    `shard` bytes, and of the optimizer's moments `kept` stay on the device between two calls; `awaited` are moments
    that come to host memory with the first
    step. Ray's object store of the node may hold `store` bytes (None: nobody said).
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
