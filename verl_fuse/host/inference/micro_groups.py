"""Puts samples together into micro-groups, and spreads micro-groups over lanes and ranks."""

import heapq
from collections.abc import Mapping, Sequence


def share(lengths: Mapping[str, int], multiples: Mapping[str, int]) -> dict[str, list[str]]:
    """Return one micro-group per lane, such that every lane has a like number of tokens; longest samples go first.

    `lengths` in tokens per key; `multiples` is per lane the number of which a micro-group's size is a multiple. Keys
    that would make up less than one multiple are left out.
    """
    ranked = sorted(lengths, key=lambda key: (-lengths[key], key))
    # Tokens of each lane; of equal lanes the first comes first.
    load = [(0, place, lane) for place, lane in enumerate(multiples)]
    groups: dict[str, list[str]] = {}
    at = 0
    while at < len(ranked):
        tokens, place, lane = load[0]
        keys = ranked[at : at + multiples[lane]]
        if len(keys) < multiples[lane]:
            break
        at += len(keys)
        heapq.heapreplace(load, (tokens + sum(lengths[key] for key in keys), place, lane))
        groups.setdefault(lane, []).extend(keys)
    return groups


def spread(keys: Sequence[str], lengths: Mapping[str, int], parts: int) -> list[str]:
    """Reorder keys so that cutting them into `parts` equal runs (verl's dispatch) gives each run a like share of
    long samples."""
    ranked = sorted(keys, key=lambda key: (-lengths[key], key))
    return [key for part in range(parts) for key in ranked[part::parts]]


def top_up(rows: Sequence[int], lengths: Sequence[int], multiple: int) -> list[int]:
    """Add the shortest other rows until the count is a multiple; all rows if there are too few."""
    missing = -len(rows) % multiple
    others = sorted(set(range(len(lengths))) - set(rows), key=lambda row: (lengths[row], row))
    if missing > len(others):
        return list(range(len(lengths)))
    return [*rows, *others[:missing]]
