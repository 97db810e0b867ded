"""Draft from earlier tokens: the tokens that followed, in this group of samples or elsewhere, the tokens with which a
sample ends now.

The history is a ring of nodes, one per token. Each node has links to the tokens before and after in its sample, and by
`CHAINS` to the last earlier node whose last tokens are the same. A draft begins at the newest such nodes; the nodes
vote, and nodes that lose a vote leave.

Invariants (tests/unit/speculation/test_history.py):
- a draft continues samples of the steps asked for, after the same tokens; it continues samples of other groups only
  after tokens that a whole chain shares;
- memory is fixed when the history is made: old tokens make room for new ones, and no draft mixes them;
- a draft depends on the tokens added, and on nothing else.
"""

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from verl_fuse.spec.arrays import Tokens

# Each chain has the number of last tokens that are the same along the chain, and whether the chain stays in its group:
# long likenesses are found among many nodes, short likenesses too.
CHAINS = ((6, True), (2, True), (2, False))
# At most so many tokens are compared.
LONGEST = 24
# So many nodes of one chain vote, the newest ones; a node that shares a token more than others has so many times their
# vote.
VOTERS, WEIGHT = 64, 3.0
# A token is drafted while the votes say that the token is accepted at least so often.
LEAST_CHANCE = 0.3
# The link before the first token of a sample, and after its last token.
NOWHERE = -1
# A node takes so many bytes, with its share of the tables of heads.
NODE_BYTES = 3 * 4 + 2 * 8 + 2 * 8 * len(CHAINS)

_KEYS = np.array([key for key, _ in CHAINS])
_OWN = np.array([own for _, own in CHAINS])


@dataclass
class History:
    """A ring with room for `size` tokens."""

    size: int
    written: int = 0
    _tokens: Tokens = field(init=False)
    _groups: Tokens = field(init=False)
    _steps: Tokens = field(init=False)
    _before: Tokens = field(init=False)
    _after: Tokens = field(init=False)
    _same: Tokens = field(init=False)
    _heads: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._groups, self._steps = (np.zeros(self.size, np.int32) for _ in range(3))
        self._before, self._after = (np.full(self.size, NOWHERE) for _ in range(2))
        self._same, self._heads = (np.full((len(CHAINS), self.size), NOWHERE) for _ in range(2))

    @classmethod
    def of_bytes(cls, size: int) -> "History":
        """Return a history of as many tokens as fit into `size` bytes."""
        return cls(max(size // NODE_BYTES, LONGEST))

    @property
    def nodes(self) -> tuple[Tokens, Tokens, Tokens, Tokens, Tokens, Tokens, Tokens]:
        """The arrays that the functions below take first."""
        return self._tokens, self._groups, self._steps, self._before, self._after, self._same, self._heads

    def add(self, tokens: Tokens, group: int, step: int, end: int = NOWHERE) -> int:
        """Put `tokens` after the node `end` of their sample; return the sample's new end."""
        new = np.ascontiguousarray(tokens, np.int32)
        end = add_tokens(*self.nodes, self.written, new, group, step, end)
        self.written += len(new)
        return end

    def draft(self, end: int, since: int, most: int, least: float = LEAST_CHANCE) -> tuple[list[int], float]:
        """Return up to `most` tokens that may follow the node `end`, from samples of the step `since` or later, and how
        many of them the votes expect to be accepted. By the votes each drafted token is accepted with a chance of at
        least `least`."""
        drafted, expected = draft_tokens(*self.nodes, self.written, end, since, max(most, 0), least)
        return drafted.tolist(), expected

    def holds(self, node: int) -> bool:
        """Tell whether the history still holds this node, not overwritten."""
        return node >= max(0, self.written - self.size)


@njit(cache=True, nogil=True)
def _key(tokens, before, oldest, end, count, seed):  # type: ignore[no-untyped-def]
    """Return a number of the `count` last tokens at the node `end`, or -1 where there are fewer tokens."""
    size = len(tokens)
    found = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(count):
        if end < oldest:
            return np.int64(-1)
        found = (found ^ np.uint64(tokens[end % size])) * np.uint64(0xD6E8FEB86659FD93)
        found ^= found >> np.uint64(32)
        end = before[end % size]
    return np.int64(found % np.uint64(size))


@njit(cache=True, nogil=True)
def add_tokens(tokens, groups, steps, before, after, same, heads, written, new, group, step, end):  # type: ignore[no-untyped-def]
    size = len(tokens)
    for token in new:
        place, oldest = written % size, max(0, written + 1 - size)
        tokens[place], groups[place], steps[place] = token, group, step
        before[place], after[place] = end if end >= oldest else -1, -1
        if end >= oldest:
            after[end % size] = written
        end = written
        written += 1
        for chain in range(len(_KEYS)):
            same[chain, place] = -1
            key = _key(tokens, before, oldest, end, _KEYS[chain], group + 1 if _OWN[chain] else 0)
            if key >= 0:
                same[chain, place] = heads[chain, key]
                heads[chain, key] = end
    return end


@njit(cache=True, nogil=True)
def _alike(tokens, before, oldest, one, other):  # type: ignore[no-untyped-def]
    """Return how many of the last tokens at two nodes are the same."""
    size = len(tokens)
    for length in range(LONGEST):
        if one < oldest or other < oldest or tokens[one % size] != tokens[other % size]:
            return length
        one, other = before[one % size], before[other % size]
    return LONGEST


@njit(cache=True, nogil=True)
def _voters(tokens, groups, steps, before, after, same, heads, oldest, end, since, nodes, votes):  # type: ignore[no-untyped-def]
    """Put the nodes that follow the same tokens as the node `end` ends with into `nodes`, and the weight of their votes
    into `votes`; return the number of nodes."""
    size, found, longest = len(tokens), 0, 0
    group = groups[end % size]
    for chain in range(len(_KEYS)):
        key = _key(tokens, before, oldest, end, _KEYS[chain], group + 1 if _OWN[chain] else 0)
        node = heads[chain, key] if key >= 0 else np.int64(-1)
        full = found + VOTERS
        while node >= oldest and found < full:
            place = node % size
            if steps[place] >= since and after[place] >= 0:
                alike = _alike(tokens, before, oldest, end, node)
                # Each node votes in the first chain that holds the node.
                met = groups[place] == group and (alike >= _KEYS[0] if chain == 1 else chain == 2)
                if alike >= _KEYS[chain] and not met and (groups[place] == group) == _OWN[chain]:
                    nodes[found], votes[found] = after[place], alike
                    longest = max(longest, alike)
                    found += 1
            # The link of a node that was overwritten since leads to a newer node.
            node = same[chain, place] if same[chain, place] < node else np.int64(-1)
    for voter in range(found):
        votes[voter] = WEIGHT ** (votes[voter] - longest)
    return found


@njit(cache=True, nogil=True)
def draft_tokens(tokens, groups, steps, before, after, same, heads, written, end, since, most, least):  # type: ignore[no-untyped-def]
    size, oldest = len(tokens), max(0, written - len(tokens))
    drafted, expected, chance = np.empty(most, np.int32), 0.0, 1.0
    if end < oldest:
        return drafted[:0], expected
    nodes, votes = np.empty(VOTERS * len(_KEYS), np.int64), np.empty(VOTERS * len(_KEYS))
    voters = _voters(tokens, groups, steps, before, after, same, heads, oldest, end, since, nodes, votes)
    names, sums = np.empty(len(nodes), np.int32), np.empty(len(nodes))
    for count in range(most):
        everyone, most_votes, winner, named = 0.0, 0.0, np.int32(-1), 0
        for voter in range(voters):
            everyone += votes[voter]
            if nodes[voter] < 0:
                continue
            token, name = tokens[nodes[voter] % size], 0
            while name < named and names[name] != token:
                name += 1
            if name == named:
                names[name], sums[name] = token, 0.0
                named += 1
            sums[name] += votes[voter]
            if sums[name] > most_votes:
                most_votes, winner = sums[name], token
        if most_votes == 0.0:
            return drafted[:count], expected
        chance *= most_votes / everyone
        if chance < least:
            return drafted[:count], expected
        expected += chance
        drafted[count] = winner
        left = 0
        for voter in range(voters):
            if nodes[voter] >= 0 and tokens[nodes[voter] % size] == winner:
                nodes[left], votes[left] = after[nodes[voter] % size], votes[voter]
                left += 1
        voters = left
    return drafted, expected


# The calls of rows.py stand in this file because numba looks at no other when it asks whether cached code is old.
@njit(cache=True, nogil=True)
def grow_rows(  # type: ignore[no-untyped-def]
    nodes, groups, steps, before, after, same, heads, written,
    length, end, group, kept, marks, tokens, rows, lengths, counts, step,
):  # fmt: skip
    """Do what rows.Rows.grow says."""
    for row in range(len(counts)):
        if counts[row] == 0:
            continue
        new = rows[row, length[row] : lengths[row]]
        end[row] = add_tokens(
            nodes, groups, steps, before, after, same, heads, written, new, group[row], step, end[row]
        )
        written += len(new)
        for token in new:
            tokens[row, kept[row]] = token
            kept[row] += 1
        length[row] = lengths[row]
        for back in range(1, min(length[row], marks.shape[1]) + 1):
            marks[row, marks.shape[1] - back] = rows[row, length[row] - back]
    return written


@njit(cache=True, nogil=True)
def draft_rows(  # type: ignore[no-untyped-def]
    nodes, groups, steps, before, after, same, heads, written,
    length, end, since, tried, expected, counts, drafts, longest, ends, least,
):  # fmt: skip
    """Do what rows.Rows.draft says; return whether anything was drafted."""
    drafted = False
    for row in range(len(counts)):
        tried[row], expected[row] = 0, 0.0
        most = min(drafts.shape[1], longest - length[row] - 1)
        if counts[row] == 0 or most <= 0:
            continue
        found, expected[row] = draft_tokens(
            nodes, groups, steps, before, after, same, heads, written, end[row], since[row], most, least
        )
        for token in found:
            drafts[row, tried[row]] = token
            tried[row] += 1
            # A draft after the end of a sample was never generated: vLLM drops such tokens.
            if (ends == token).any():
                break
        drafted |= tried[row] > 0
    return drafted
