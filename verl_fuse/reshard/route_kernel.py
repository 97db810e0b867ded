"""Compiles the parts of `routes`: deliveries of streams to nodes, and their cuts."""

import numpy as np
from numba import njit


@njit(cache=True)
def deliveries(source, target, first, ranks, nodes):
    """Return (stream, node, place of the first holder there or -1, holders there, first needer, needers): one delivery
    per stream and node that needs it."""
    streams, places, held, holders, need_first = (
        [0],
        [0],
        [0],
        [0],
        [0],
    )
    needers = [0]
    for stream in range(len(source)):
        have, have_end = first[source[stream]], first[source[stream] + 1]
        want, want_end = first[target[stream]], first[target[stream] + 1]
        while want < want_end:
            node = nodes[ranks[want]]
            while have < have_end and nodes[ranks[have]] < node:
                have += 1
            begin = have
            while have < have_end and nodes[ranks[have]] == node:
                have += 1
            before, at = len(needers), begin
            while want < want_end and nodes[ranks[want]] == node:
                while at < have and ranks[at] < ranks[want]:
                    at += 1
                if at == have or ranks[at] != ranks[want]:
                    needers.append(ranks[want])
                want += 1
            if len(needers) > before:
                streams.append(stream)
                places.append(node)
                held.append(begin if have > begin else -1)
                holders.append(have - begin)
                need_first.append(len(needers) - 1)
    return (
        np.array(streams[1:], np.int64),
        np.array(places[1:], np.int64),
        np.array(held[1:], np.int64),
        np.array(holders[1:], np.int64),
        np.array(need_first, np.int64),
        np.array(needers[1:], np.int64),
    )


@njit(cache=True)
def rows(
    sizes,
    far,
    need_first,
    send_line,
    send_place,
    send_first,
    senders,
    send_cuts,
    entry_line,
    entry_place,
    entry_first,
    entries,
    entry_cuts,
):
    """Return (delivery, low, high, sender, place of the first receiver among the needers): deliveries cut where sender
    or receiver changes.

    Near deliveries start at different needers in turn, so that the last needer of the chain changes.
    """
    found, lows, highs, who, starts = [0], [0], [0], [0], [0]
    for d in range(len(sizes)):
        line, other = send_line[d], entry_line[d]
        s, s_end = _at(send_cuts, send_first[line], send_first[line + 1], send_place[d]), send_first[line + 1]
        e, e_end = _at(entry_cuts, entry_first[other], entry_first[other + 1], entry_place[d]), entry_first[other + 1]
        low = 0
        while low < sizes[d]:
            s_next = send_cuts[s + 1] - send_place[d] if s + 1 < s_end else sizes[d]
            e_next = entry_cuts[e + 1] - entry_place[d] if far[d] and e + 1 < e_end else sizes[d]
            high = min(sizes[d], s_next, e_next)
            if high > low:
                found.append(d)
                lows.append(low)
                highs.append(high)
                who.append(senders[s])
                starts.append(e - entry_first[other] if far[d] else d % (need_first[d + 1] - need_first[d]))
                low = high
            if s_next <= low:
                s += 1
            if e_next <= low:
                e += 1
    return (
        np.array(found[1:], np.int64),
        np.array(lows[1:], np.int64),
        np.array(highs[1:], np.int64),
        np.array(who[1:], np.int64),
        np.array(starts[1:], np.int64),
    )


@njit(cache=True)
def _at(cuts, first, last, place):
    """Return the last candidate whose part begins at or before `place`."""
    low, high = first, last - 1
    while low < high:
        middle = (low + high + 1) // 2
        if cuts[middle] <= place:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True)
def keys(delivery, sender, start, need_first, needers):
    """Return a number per row, equal for equal sender and chain (FNV-1a)."""
    keys = np.empty(len(delivery), np.uint64)
    for row in range(len(delivery)):
        begin, count = need_first[delivery[row]], need_first[delivery[row] + 1] - need_first[delivery[row]]
        key = (np.uint64(14695981039346656037) ^ np.uint64(sender[row])) * np.uint64(1099511628211)
        for hop in range(count):
            rank = needers[begin + (start[row] + hop) % count]
            key = (key ^ np.uint64(rank)) * np.uint64(1099511628211)
        keys[row] = key
    return keys


@njit(cache=True)
def chains(example, delivery, start, need_first, needers):
    """Return the ranks of each flow's chain."""
    first = np.zeros(len(example) + 1, np.int64)
    for flow in range(len(example)):
        d = delivery[example[flow]]
        first[flow + 1] = first[flow] + need_first[d + 1] - need_first[d]
    chain = np.empty(first[-1], np.int64)
    for flow in range(len(example)):
        d, count = delivery[example[flow]], first[flow + 1] - first[flow]
        for hop in range(count):
            chain[first[flow] + hop] = needers[need_first[d] + (start[example[flow]] + hop) % count]
    return first, chain


@njit(cache=True)
def same(flow, example, delivery, sender, start, need_first, needers):
    """Tell whether all rows of a flow have its sender and chain."""
    for row in range(len(flow)):
        other = example[flow[row]]
        d, e = delivery[row], delivery[other]
        count = need_first[d + 1] - need_first[d]
        if sender[row] != sender[other] or count != need_first[e + 1] - need_first[e]:
            return False
        for hop in range(count):
            if (
                needers[need_first[d] + (start[row] + hop) % count]
                != needers[need_first[e] + (start[other] + hop) % count]
            ):
                return False
    return True
