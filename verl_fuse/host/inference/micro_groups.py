"""Puts samples together into micro-groups, and spreads micro-groups over lanes and ranks.

Samples of a group belong together: where a rank computes a prompt once, those of the prompt, else each sample alone.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TypeVar

Row = TypeVar("Row")

# The group of a sample, by its key.
GroupOf = Callable[[str], Hashable]


def share(lengths: Mapping[str, int], multiples: Mapping[str, int], group_of: GroupOf) -> dict[str, list[str]]:
    """Return one micro-group per lane, such that every lane has a like number of tokens; the groups of the longest
    samples go first, whole up to a multiple.

    `lengths` in tokens per key; `multiples` is per lane the number of which a micro-group's size is a multiple. Keys
    that would make up less than one multiple are left out.
    """
    groups_of_all = _groups(sorted(lengths, key=lambda key: (-lengths[key], key)), group_of)
    ranked = list(chain(*groups_of_all))
    # The places where groups end, for each key.
    ends = [end for group, end in zip(groups_of_all, accumulate(map(len, groups_of_all)), strict=True) for _ in group]
    # Tokens of each lane; of equal lanes the first comes first.
    load = [(0, place, lane) for place, lane in enumerate(multiples)]
    groups: dict[str, list[str]] = {}
    at = 0
    while at < len(ranked):
        tokens, place, lane = load[0]
        multiple = multiples[lane]
        keys = ranked[at : at + max(1, (ends[at] - at) // multiple) * multiple]
        if len(keys) < multiple:
            break
        at += len(keys)
        heapq.heapreplace(load, (tokens + sum(lengths[key] for key in keys), place, lane))
        groups.setdefault(lane, []).extend(keys)
    return groups


def spread(keys: Sequence[str], lengths: Mapping[str, int], parts: int, group_of: GroupOf) -> list[str]:
    """Reorder keys so that cutting them into `parts` equal runs (verl's dispatch) gives each run a like share of
    long samples, groups whole as far as a run has room."""
    groups = _groups(sorted(keys, key=lambda key: (-lengths[key], key)), group_of)
    if len(groups) < len(keys):
        return list(chain(*packed(groups, parts, len(keys) // parts, lambda group: sum(lengths[key] for key in group))))
    ranked = list(chain(*groups))
    return [key for part in range(parts) for key in ranked[part::parts]]


def packed(groups: Sequence[list[Row]], parts: int, size: int, work: Callable[[list[Row]], int]) -> list[list[Row]]:
    """Return `parts` lists of `size` rows: groups whole as long as a list has room for them, those of the most work
    first, to the list with the least."""
    waiting = deque(sorted(groups, key=work, reverse=True))
    found: list[list[Row]] = [[] for _ in range(parts)]
    loads = [0] * parts
    while waiting:
        group = waiting.popleft()
        free = [size - len(each) for each in found]
        room = [part for part in range(parts) if free[part] >= len(group)]
        part = min(room, key=loads.__getitem__) if room else max(range(parts), key=free.__getitem__)
        taken, rest = group[: free[part]], group[free[part] :]
        found[part] += taken
        loads[part] += work(taken)
        if rest:
            waiting.appendleft(rest)
    return found


def _groups(keys: Sequence[str], group_of: GroupOf) -> list[list[str]]:
    """Return the keys by group, in the order of their first keys."""
    found: dict[Hashable, list[str]] = {}
    for key in keys:
        found.setdefault(group_of(key), []).append(key)
    return list(found.values())


def top_up(rows: Sequence[int], lengths: Sequence[int], multiple: int) -> list[int]:
    """Add the shortest other rows until the count is a multiple; all rows if there are too few."""
    missing = -len(rows) % multiple
    others = sorted(set(range(len(lengths))) - set(rows), key=lambda row: (lengths[row], row))
    if missing > len(others):
        return list(range(len(lengths)))
    return [*rows, *others[:missing]]
