"""The samples in the rows of vLLM's batch, as arrays: a pass asks for all rows at once, not for each.

Invariants (tests/unit/speculation/test_rows.py):
- a sample stays in its row where the row has the tokens it had, and more;
- tokens and drafts of all rows are those of one row after the other;
- no draft reaches beyond the longest sequence or past the end of a sample.
"""

import numpy as np
from numba import njit

from verl_fuse.spec.arrays import Ints, Tokens
from verl_fuse_speculation.history import History, draft_rows, grow_rows

# By its length and so many last tokens a sample is known again in another row or after passes that left the sample out.
KNOWN_TOKENS = 32
# What a row has: no new tokens, new tokens of the sample that it had in the last pass, or of another one.
NOTHING, STAYS, OTHER = 0, 1, 2
_FREE = -1


class Rows:
    """A row has `length` tokens of a sample whose last node in the history is `end`, of the group `group`, which is
    drafted from samples of the step `since` or later; `tokens` are the `kept` last ones of them. Of the tokens drafted
    for it in the last pass, `tried`, `expected` should be accepted."""

    def __init__(self, longest: int, ends: Ints):
        self._longest, self._ends = longest, ends
        self.length, self.end, self.group, self.since, self.kept, self.tried, self.found = (
            np.empty(0, np.int64) for _ in range(7)
        )
        self.expected = np.empty(0)
        self._marks, self._tokens = (np.empty((0, width), np.int32) for width in (KNOWN_TOKENS, longest))

    def fit(self, count: int) -> None:
        """Make room for `count` rows; the new ones are free."""
        had = len(self.length)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and array is not self._ends:
                # Pages that no token is written to take no memory.
                room = np.zeros((count, *array.shape[1:]), array.dtype)
                room[:had] = array
                setattr(self, name, room)
        self.length[had:] = _FREE

    def look(self, rows: Tokens, lengths: Ints, counts: Ints) -> tuple[bool, bool]:
        """Write into `found` what each row has: `lengths` tokens, of which the last `counts` are new. Return whether
        any sample began, moved or left, and whether a sample grew in a pass that did not ask for drafts."""
        return _look(self.length, self._marks, self.found, rows, lengths, counts)

    def known(self, row: int) -> bytes:
        """Return the last KNOWN_TOKENS of the sample in the row, or all, as bytes."""
        return self._marks[row, max(KNOWN_TOKENS - self.length[row], 0) :].tobytes()

    def take(self, row: int) -> bytes:
        """Return the tokens that the row has kept, as bytes, and keep them no longer."""
        taken = self._tokens[row, : self.kept[row]].tobytes()
        self.kept[row] = 0
        return taken

    def place(self, row: int, length: int, end: int, group: int, tried: int, expected: float) -> None:
        """Put a sample into a free row; its tokens come when it grows."""
        self.length[row], self.end[row], self.group[row], self.kept[row] = length, end, group, 0
        self.tried[row], self.expected[row] = tried, expected

    def free(self, row: int) -> None:
        self.length[row] = _FREE

    def grow(self, history: History, rows: Tokens, lengths: Ints, counts: Ints, step: int) -> None:
        """Put the tokens that rows with new ones have by now into the history."""
        own = self.length, self.end, self.group, self.kept, self._marks, self._tokens
        history.written = grow_rows(*history.nodes, history.written, *own, rows, lengths, counts, step)

    def draft(self, history: History, counts: Ints, most: int, least: float) -> list[list[int]]:
        """Return up to `most` tokens for each row with new ones, accepted with a chance of `least` by the votes; none
        for the others."""
        width = max(most, 0)
        drafts = np.empty((len(counts), width), np.int32)
        own = self.length, self.end, self.since, self.tried, self.expected
        limits = self._longest, self._ends, least
        if not draft_rows(*history.nodes, history.written, *own, counts, drafts, *limits):
            return [[] for _ in range(len(counts))]
        return [row[:tried] for row, tried in zip(drafts.tolist(), self.tried.tolist(), strict=False)]


def compile_kernels() -> None:
    """Compile the functions of a pass, or read them from numba's cache, before an engine waits for them."""
    history, rows = History.of_bytes(0), Rows(4, np.zeros(1, np.int64))
    rows.fit(1)
    tokens, lengths, counts = np.zeros((1, 4), np.int32), np.ones(1, np.int64), np.ones(1, np.int64)
    rows.look(tokens, lengths, counts)
    rows.place(0, 0, history.add(tokens[0], 0, 0), 0, 0, 0.0)
    rows.grow(history, tokens, lengths, counts, 0)
    rows.draft(history, counts, 1, 0.5)


@njit(cache=True, nogil=True)
def _look(length, marks, found, rows, lengths, counts):  # type: ignore[no-untyped-def]
    changed = skipped = False
    for row in range(len(length)):
        here = length[row] >= 0
        found[row] = 0
        if row >= len(counts) or counts[row] == 0:
            changed |= here
            continue
        had, start = length[row], lengths[row] - counts[row]
        same = here and had <= start
        for back in range(1, min(had, KNOWN_TOKENS) + 1 if same else 0):
            if rows[row, had - back] != marks[row, KNOWN_TOKENS - back]:
                same = False
                break
        found[row] = STAYS if same else OTHER
        changed |= not same
        skipped |= same and had < start
    return changed, skipped
