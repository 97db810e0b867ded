"""Puts samples together into micro-groups, and spreads micro-groups over lanes and ranks.

Where a rank computes a prompt once, samples of a prompt stay together as far as lanes and ranks have even work.

Invariants (tests/unit/host/test_sample_groups.py):
- no lane gets a piece of a prompt's samples that is larger than an even share of all tokens;
- the slowest rank computes no more tokens than with each sample by itself.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

Row = TypeVar("Row")
# The group of each sample whose prompt is shared, and the tokens that the group's samples share, by key.
Prompts = Mapping[str, tuple[Hashable, int]]
_ALONE: Prompts = {}


def share(lengths: Mapping[str, int], multiples: Mapping[str, int], prompts: Prompts = _ALONE) -> dict[str, list[str]]:
    """Return one micro-group per lane, such that every lane has a like number of tokens; the groups of the longest
    samples go first.

    `lengths` in tokens per key; `multiples` is per lane the number of which a micro-group's size is a multiple. Keys
    that would make up less than one multiple are left out.
    """
    even = sum(lengths.values()) / max(1, len(multiples))
    ranked = list(chain(*_groups(sorted(lengths, key=lambda key: (-lengths[key], key)), prompts)))
    # Tokens of each lane; of equal lanes the first comes first.
    load = [(0, place, lane) for place, lane in enumerate(multiples)]
    groups: dict[str, list[str]] = {}
    at = 0
    while at < len(ranked):
        tokens, place, lane = load[0]
        keys: list[str] = []
        while len(more := ranked[at : at + multiples[lane]]) == multiples[lane]:
            of_one = {_group_of(key, prompts) for key in (*keys, *more)}
            if keys and (len(of_one) > 1 or sum(lengths[key] for key in (*keys, *more)) > even):
                break
            keys += more
            at += len(more)
        if not keys:
            break
        heapq.heapreplace(load, (tokens + sum(lengths[key] for key in keys), place, lane))
        groups.setdefault(lane, []).extend(keys)
    return groups


def spread(keys: Sequence[str], lengths: Mapping[str, int], parts: int, prompts: Prompts = _ALONE) -> list[str]:
    """Reorder keys so that cutting them into `parts` equal runs (verl's dispatch) gives each run a like share of
    long samples."""

    def tokens(run: Sequence[str]) -> int:
        of_prompts = {group: shared for group, shared in (prompts[key] for key in run if key in prompts)}
        copies = sum(prompts[key][1] for key in run if key in prompts) - sum(of_prompts.values())
        return sum(lengths[key] for key in run) - copies

    ranked = sorted(keys, key=lambda key: (-lengths[key], key))
    orders = [[ranked[part::parts] for part in range(parts)]]
    if len(groups := _groups(ranked, prompts)) < len(ranked):
        orders.append(packed(groups, parts, len(ranked) // parts, tokens))
    return list(chain(*min(orders, key=lambda runs: max(map(tokens, runs)))))


def packed(groups: Sequence[list[Row]], parts: int, size: int, work: Callable[[list[Row]], int]) -> list[list[Row]]:
    """Return `parts` lists of `size` rows: groups whole as long as a list has room for them, those of the most work
    first, to the list with the least."""
    assert sum(map(len, groups)) <= parts * size, "more rows than places"
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


def _groups(keys: Sequence[str], prompts: Prompts) -> list[list[str]]:
    """Return the keys by group, in the order of their first keys."""
    found: dict[Hashable, list[str]] = {}
    for key in keys:
        found.setdefault(_group_of(key, prompts), []).append(key)
    return list(found.values())


def _group_of(key: str, prompts: Prompts) -> Hashable:
    return prompts[key][0] if key in prompts else key


def top_up(rows: Sequence[int], lengths: Sequence[int], multiple: int) -> list[int]:
    """Add the shortest other rows until the count is a multiple; all rows if there are too few."""
    missing = -len(rows) % multiple
    others = sorted(set(range(len(lengths))) - set(rows), key=lambda row: (lengths[row], row))
    if missing > len(others):
        return list(range(len(lengths)))
    return [*rows, *others[:missing]]
