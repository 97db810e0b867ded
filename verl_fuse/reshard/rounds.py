"""Cuts flows into messages of a bounded size, in an order in which every rank sends one and receives one at a time.

Invariants (tests/unit/reshard/test_parts.py):
- a message is at most `limit` elements long, and the messages of a flow differ by at most one element;
- in a round a rank sends at most one message and receives at most one;
- a rank passes a message on in a later round than it received it. So a run in which every rank sends in the order of
  rounds, and receives in the order of rounds, cannot deadlock: of all messages that are not through, the messages of
  the first round do not wait.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from verl_fuse.reshard.order import order_of
from verl_fuse.reshard.routes import Flows
from verl_fuse.spec.arrays import Ints


@dataclass(frozen=True)
class Hops:
    """Hop h brings the elements `low[h]` to `high[h]` of flow `flow[h]` from rank `sender[h]` to `receiver[h]`, in
    `round[h]`. Hops are in order of rounds.

    `place` is the receiver's place in the flow's chain; from 1 on the sender passes on a part that it received."""

    round: Ints
    sender: Ints
    receiver: Ints
    flow: Ints
    place: Ints
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.round)


def hops_of(flows: Flows, limit: int, ranks: int) -> Hops:
    """Cut flows into messages of at most `limit` elements and put them in order: first fit, the longest flows first."""
    elements = flows.elements
    counts = -(-elements // limit)
    flow = np.repeat(np.arange(len(flows)), counts)
    number = np.arange(len(flow)) - np.repeat(np.cumsum(counts) - counts, counts)
    low, high = number * elements[flow] // counts[flow], (number + 1) * elements[flow] // counts[flow]
    distance = (flows.chain[flows.chain_first[:-1]] - flows.source) % ranks
    longest = int(counts.max(initial=0))
    order = order_of((number - counts[flow] + longest) * ranks + distance[flow], longest * ranks)
    flow, low, high = flow[order], low[order], high[order]
    lengths = np.diff(flows.chain_first)[flow]
    message = np.repeat(np.arange(len(flow)), lengths)
    place = np.arange(len(message)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = flows.chain_first[flow[message]] + place
    sender = np.where(place == 0, flows.source[flow[message]], flows.chain[np.maximum(at - 1, 0)])
    receiver = flows.chain[at]
    busiest = max(np.bincount(side, minlength=1).max() for side in (sender, receiver))
    words, rounds = int(busiest) // 50 + 4, np.empty(0, np.int64)
    while len(rounds) < len(message):
        rounds = _first_fit(flow, len(message), flows.source, flows.chain_first, flows.chain, ranks, words)
        words *= 2
    by_round = order_of(rounds * ranks + sender, (int(rounds.max(initial=0)) + 1) * ranks)
    arrays = (rounds, sender, receiver, flow[message], place, low[message], high[message])
    return Hops(*(array[by_round] for array in arrays))


@njit(cache=True)
def _first_fit(flow, hops, source, chain_first, chain, ranks, words):
    """Return the round of each hop, message by message; empty if `words` times 64 rounds are too few."""
    rounds = np.empty(hops, np.int64)
    sends = np.zeros((ranks, words), np.uint64)
    receives = np.zeros((ranks, words), np.uint64)
    # All rounds before these are taken, so the search may start there.
    send_from, receive_from = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    full, one = ~np.uint64(0), np.uint64(1)
    hop = 0
    for f in flow:
        sender, ready = source[f], 0
        for at in range(chain_first[f], chain_first[f + 1]):
            receiver = chain[at]
            word = max(ready // 64, send_from[sender], receive_from[receiver])
            mask = full << np.uint64(ready % 64) if word == ready // 64 else full
            while word < words:
                free = ~(sends[sender, word] | receives[receiver, word]) & mask
                if free:
                    break
                word, mask = word + 1, full
            if word == words:
                return rounds[:0]
            bit = 0
            while not free & (one << np.uint64(bit)):
                bit += 1
            sends[sender, word] |= one << np.uint64(bit)
            receives[receiver, word] |= one << np.uint64(bit)
            while send_from[sender] < words and sends[sender, send_from[sender]] == full:
                send_from[sender] += 1
            while receive_from[receiver] < words and receives[receiver, receive_from[receiver]] == full:
                receive_from[receiver] += 1
            rounds[hop] = word * 64 + bit
            ready = rounds[hop] + 1
            sender = receiver
            hop += 1
    return rounds
