"""Plans a transfer program: the elements that every rank sends, receives and keeps to get from one layout to another.

Invariants (tests/unit/reshard/test_transfer_program.py, by an independent checker that looks at single elements):
- after the program every rank of the target holds all its parameters' elements, and received no element that it held
before, and no element twice;
- the bytes moved are the lower bound: elements that ranks want and do not hold; over the network, one copy for each
node without a copy;
- a message is at most a quarter of `bucket_bytes` long: a rank needs two messages to send and two to receive.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.rounds import Hops, hops_of
from verl_fuse.reshard.routes import Flows, flows_of
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.streams import Ints, Streams, streams_of

BUCKET_BYTES = 256 << 20
# A bucket is two messages leaving and two arriving.
MESSAGES_PER_BUCKET = 4


@dataclass(frozen=True, slots=True)
class StreamRange:
    """The elements `low` to `high` of a stream."""

    stream: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Message:
    """Spans one after the other, from rank `sender` to rank `receiver`. `relayed`: the sender received the spans itself
    in this program."""

    round: int
    sender: int
    receiver: int
    spans: tuple[StreamRange, ...]
    relayed: bool

    @property
    def elements(self) -> int:
        return sum(span.high - span.low for span in self.spans)


@dataclass(frozen=True)
class TransferProgram:
    """A program from `source` to `target`; `nodes[r]` is the node of rank r, `item_bytes` the bytes of an element on
    the way."""

    weights: ModelParameters
    source: PlacedSharding
    target: PlacedSharding
    nodes: tuple[int, ...]
    item_bytes: int
    bucket_bytes: int
    streams: Streams
    flows: Flows
    hops: Hops

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank sends, in order."""
        return self._messages(np.flatnonzero(self.hops.sender == rank))

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank receives, in order."""
        return self._messages(np.flatnonzero(self.hops.receiver == rank))

    def kept(self, rank: int) -> tuple[StreamRange, ...]:
        """Return the ranges that a rank wants and holds already."""
        groups = self.streams.groups
        inside = np.array([rank in group for group in groups], np.bool_)
        found = np.flatnonzero(inside[self.streams.source] & inside[self.streams.target])
        return tuple(StreamRange(int(stream), 0, int(self.streams.size[stream])) for stream in found)

    @property
    def message_elements(self) -> int:
        """Return the largest number of elements of a message."""
        return self.bucket_bytes // MESSAGES_PER_BUCKET // self.item_bytes

    @property
    def bytes(self) -> int:
        """Return the bytes that ranks receive."""
        return int((self.hops.high - self.hops.low).sum()) * self.item_bytes

    @property
    def network_bytes(self) -> int:
        """Return the bytes that pass between nodes."""
        nodes = np.array(self.nodes, np.int64)
        far = nodes[self.hops.sender] != nodes[self.hops.receiver]
        return int((self.hops.high - self.hops.low)[far].sum()) * self.item_bytes

    @cached_property
    def digest(self) -> str:
        """Return a digest that is equal for equal programs."""
        digest = hashlib.sha256(f"{self.source} > {self.target} {self.item_bytes} {self.weights.model}".encode())
        for part in (self.streams, self.flows, self.hops):
            for value in vars(part).values():
                digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return digest.hexdigest()

    @cached_property
    def _ends(self) -> Ints:
        """Return the end of each row on the line of all flows."""
        return np.cumsum(self.flows.high - self.flows.low)

    def _messages(self, hops: Ints) -> tuple[Message, ...]:
        table, found = self.hops, []
        for hop in hops.tolist():
            found.append(
                Message(
                    int(table.round[hop]),
                    int(table.sender[hop]),
                    int(table.receiver[hop]),
                    self._spans(int(table.flow[hop]), int(table.low[hop]), int(table.high[hop])),
                    bool(table.place[hop]),
                )
            )
        return tuple(found)

    def _spans(self, flow: int, low: int, high: int) -> tuple[StreamRange, ...]:
        """Return the part `low` to `high` of a flow."""
        flows, ends = self.flows, self._ends
        first, last = int(flows.row_first[flow]), int(flows.row_first[flow + 1])
        before = int(ends[first - 1]) if first else 0
        row, spans = int(np.searchsorted(ends[first:last], before + low, "right")) + first, []
        while low < high:
            end = int(ends[row]) - before
            begin = end - int(flows.high[row] - flows.low[row])
            stop = min(high, end)
            at = int(flows.low[row])
            spans.append(StreamRange(int(flows.stream[row]), at + low - begin, at + stop - begin))
            low, row = stop, row + 1
        return tuple(spans)


def plan_transfer(
    weights: ModelParameters,
    source: PlacedSharding,
    target: PlacedSharding,
    *,
    nodes: Sequence[int],
    item_bytes: int = 2,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferProgram:
    """Return the program from one layout to another. `nodes[r]` is the node of rank r, for all ranks of both layouts;
    `bucket_bytes` bounds a rank's memory besides both layouts' tensors."""
    if item_bytes not in (1, 2, 4, 8):
        raise FuseError(f"item_bytes={item_bytes!r}; needs 1, 2, 4 or 8")
    limit = bucket_bytes // MESSAGES_PER_BUCKET // item_bytes
    if limit < 1:
        raise FuseError(f"bucket_bytes={bucket_bytes!r}; needs at least {MESSAGES_PER_BUCKET * item_bytes}")
    for placed in (source, target):
        placed.sharding.check(weights)
        if max(placed.ranks) >= len(nodes):
            raise FuseError(f"layout {placed}: nodes are given for ranks 0 to {len(nodes) - 1}")
    streams = streams_of(weights, source, target, nodes)
    flows = flows_of(streams, np.array(nodes, np.int64))
    hops = hops_of(flows, limit, len(nodes))
    return TransferProgram(weights, source, target, tuple(nodes), item_bytes, bucket_bytes, streams, flows, hops)


def lower_bound(program: TransferProgram) -> tuple[int, int]:
    """Return (bytes that ranks want and do not hold, bytes for one copy to every node that wants elements and has no
    copy), from the layouts alone."""
    streams, nodes = program.streams, program.nodes
    wanted = crossing = 0
    for source, target, size in zip(streams.source, streams.target, streams.size, strict=True):
        held = set(streams.groups[source])
        missing = [rank for rank in streams.groups[target] if rank not in held]
        there = {nodes[rank] for rank in held}
        wanted += len(missing) * int(size)
        crossing += len({nodes[rank] for rank in missing} - there) * int(size)
    return wanted * program.item_bytes, crossing * program.item_bytes
