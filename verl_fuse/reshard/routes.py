"""Plans sender and receivers of each element: a node gets one copy of each missing element from the least loaded rank
that has it, then the element goes from rank to rank within the node.

A stream is delivered to a node when ranks there want it and do not hold it. If a rank of that node holds the stream,
that rank sends it; else the ranks that hold it share the work, and the ranks of the node that want it share receiving
it. The stream then goes on along a chain of the other ranks. Source of the idea: ReaL (arXiv 2406.14088), parameter
reallocation; ReaL broadcasts from one sender, a chain loads every rank once.

Invariants (tests/unit/reshard/test_transfer_program.py):
- a rank receives exactly the elements that it wants and does not hold, once; a node without a holder gets one copy;
- the largest load of a holder, over the network and within nodes, is within 10 % of the smallest possible.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_fuse.reshard.balance import balanced_cuts
from verl_fuse.reshard.order import order_of
from verl_fuse.reshard.route_kernel import chains, deliveries, keys, rows, same
from verl_fuse.reshard.streams import Streams
from verl_fuse.spec.arrays import Ints


@dataclass(frozen=True)
class Flows:
    """Flow f goes from rank `source[f]` along the ranks `chain[chain_first[f]:chain_first[f + 1]]`. It carries
    the rows `row_first[f]` to `row_first[f + 1]` one after the other: row i is the elements `low[i]` to
    `high[i]` of stream `stream[i]`."""

    source: Ints
    chain_first: Ints
    chain: Ints
    row_first: Ints
    stream: Ints
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def elements(self) -> Ints:
        """Return the length of each flow."""
        ends = np.append(0, np.cumsum(self.high - self.low))[self.row_first]
        return np.diff(ends)


def flows_of(streams: Streams, nodes: Ints) -> Flows:
    """Return the flows that carry out the streams; `nodes[r]` is the node of rank r."""
    first = np.append(0, np.cumsum([len(group) for group in streams.groups]))
    ranks = np.array([rank for group in streams.groups for rank in group], np.int64)
    stream, node, held, holders, need_first, needers = deliveries(streams.source, streams.target, first, ranks, nodes)
    sizes, far = streams.size[stream], held < 0
    # Lines: all elements that a set of holders has to send, one node after the other, and all elements that the wanting
    # ranks of a node have to receive.
    node_count = int(nodes.max(initial=0)) + 1
    send_line = streams.source[stream] * (node_count + 1) + np.where(far, 0, node + 1)
    send_members = np.where(far, first[streams.source[stream]], held)
    send_counts = np.where(far, np.diff(first)[streams.source[stream]], holders)
    send = _line(send_line, far, sizes, send_members, send_counts, ranks, len(nodes), node, node_count)
    entry_line = streams.target[stream] * node_count + node
    entry = _line(
        entry_line, far, sizes, need_first[:-1], np.diff(need_first), needers, len(nodes), np.zeros_like(node), 1
    )
    cut = rows(sizes, far, need_first, *send, *entry)
    delivery, low, high, sender, start = cut
    key = keys(delivery, sender, start, need_first, needers)
    _, example, flow = np.unique(key, return_index=True, return_inverse=True)
    # Deliveries come in order of streams, and their parts in order.
    order = order_of(flow, len(example))
    chain_first, chain = chains(example, delivery, start, need_first, needers)
    assert same(flow, example, delivery, sender, start, need_first, needers), "two flows have the same key"
    counts = np.bincount(flow, minlength=len(example))
    return Flows(
        source=sender[example],
        chain_first=chain_first,
        chain=chain,
        row_first=np.append(0, np.cumsum(counts)),
        stream=stream[delivery][order],
        low=low[order],
        high=high[order],
    )


def _line(
    key: Ints,
    far: NDArray[np.bool_],
    sizes: Ints,
    begin: Ints,
    count: Ints,
    ranks: Ints,
    world: int,
    then: Ints,
    then_count: int,
):
    """Return (line of each delivery, its place on the line, first candidate of each line, candidates, cuts); far and
    near loads are balanced apart. On a line deliveries come in order of `then`, numbers below `then_count`."""
    _, example, line = np.unique(key * 2 + far, return_index=True, return_inverse=True)
    order = order_of(line * then_count + then, len(example) * then_count)
    ends = np.cumsum(sizes[order])
    totals = np.bincount(line, weights=sizes, minlength=len(example)).astype(np.int64)
    starts = np.append(0, np.cumsum(totals))[:-1]
    place = np.empty_like(ends)
    place[order] = ends - sizes[order] - starts[line[order]]
    first = np.append(0, np.cumsum(count[example]))
    candidates = _gathered(begin[example], count[example], ranks)
    cuts = np.zeros(len(candidates), np.int64)
    for side in (False, True):
        chosen = np.flatnonzero(far[example] == side)
        members = _gathered(first[chosen], np.diff(first)[chosen], np.arange(len(candidates)))
        some = np.append(0, np.cumsum(np.diff(first)[chosen]))
        cuts[members] = balanced_cuts(totals[chosen], some, candidates[members], world)
    return line, place, first, candidates, cuts


def _gathered(begin: Ints, count: Ints, values: Ints) -> Ints:
    """Return `values[begin[i]:begin[i] + count[i]]` of all i, one after the other."""
    ends = np.cumsum(count)
    return values[np.arange(ends[-1] if len(ends) else 0) + np.repeat(begin - (ends - count), count)]
