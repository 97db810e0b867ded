"""A covering array: few rows in which every pair of values of two factors occurs that may occur
(greedy, deterministic).

Invariants (test_covering.py):
- every pair that is not refused is in a row, and no row holds a refused pair;
- the same factors and refusals make the same rows;
- a row that is begun keeps its values;
- a value that is not asked for is its factor's first, so that rows stay plain.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

# (factor, value) twice, in the order of the factors.
Item = tuple[str, str]
Pair = tuple[Item, Item]
Names = Mapping[str, Sequence[str]]

# So many uncovered pairs are tried as the start of a row; the row that covers most is taken.
STARTS = 24


def all_pairs(names: Names) -> list[Pair]:
    """Every pair of values of two different factors."""
    return [((one, a), (other, b)) for one, other in combinations(names, 2) for a in names[one] for b in names[other]]


def pairs_of(row: Mapping[str, str], names: Names) -> Iterator[Pair]:
    """The pairs that a row holds, as `all_pairs` writes them; a row that lacks factors has fewer."""
    items = [(name, row[name]) for name in names if name in row]
    return combinations(items, 2)


def covering_rows(
    names: Names, refused: Collection[Pair], begun: Sequence[Mapping[str, str]] = ()
) -> list[dict[str, str]]:
    """Rows that cover every pair outside `refused`: first one for each of `begun`, which has its values,
    then those that cover most."""
    refused = frozenset(refused)
    uncovered = dict.fromkeys(pair for pair in all_pairs(names) if pair not in refused)
    rows = []
    while uncovered or len(rows) < len(begun):
        starts = [begun[len(rows)]] if len(rows) < len(begun) else [dict(pair) for pair in list(uncovered)[:STARTS]]
        candidates = [_row(start, names, uncovered, refused) for start in starts]
        best = max(candidates, key=lambda row: sum(pair in uncovered for pair in pairs_of(row, names)))
        rows.append(best)
        for pair in pairs_of(best, names):
            uncovered.pop(pair, None)
    return rows


def _row(
    start: Mapping[str, str], names: Names, uncovered: Mapping[Pair, None], refused: Collection[Pair]
) -> dict[str, str]:
    row = dict(start)
    for name in names:
        if name in row:
            continue
        options = [value for value in names[name] if _fits({**row, name: value}, name, names, refused)]
        if not options:
            raise ValueError(f"no value of {name} fits {row}: the refused pairs leave none")
        # Of equally good ones the first, which is the plainest.
        row[name] = max(options, key=lambda value: _gain({**row, name: value}, name, names, uncovered))
    return {name: row[name] for name in names}


def _touching(row: Mapping[str, str], name: str, names: Names) -> Iterator[Pair]:
    return (pair for pair in pairs_of(row, names) if name in (pair[0][0], pair[1][0]))


def _fits(row: Mapping[str, str], name: str, names: Names, refused: Collection[Pair]) -> bool:
    return not any(pair in refused for pair in _touching(row, name, names))


def _gain(row: Mapping[str, str], name: str, names: Names, uncovered: Mapping[Pair, None]) -> int:
    return sum(pair in uncovered for pair in _touching(row, name, names))
