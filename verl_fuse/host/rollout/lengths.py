"""Predicts the lengths of a running step's sequences: the room in a replica's KV cache follows from the prediction, not
from the configured limit.

Invariants (tests/unit/host/test_sequence_lengths.py):
- the few samples left at the end are the long samples: they are taken to be as long as the longest share of recent
steps;
- before a step was seen, unfinished samples are taken to go on beyond the longest response so far, like lifetimes
without memory;
- a prediction is never above the limit, and equals the limit while no length is known.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The lengths of this many recent steps count.
RECENT = 4

Lengths = Sequence[tuple[int, int]]
"""(prompt, response) tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class LengthTotals:
    """Sums over some finished sequences: their number, the tokens of their prompts and of their responses, and the
    tokens of the longest response."""

    count: int = 0
    prompts: int = 0
    responses: int = 0
    longest: int = 0

    @classmethod
    def of(cls, lengths: Lengths) -> "LengthTotals":
        prompts, responses = zip(*lengths, strict=True) if lengths else ((), ())
        return cls(len(lengths), sum(prompts), sum(responses), max(responses, default=0))


NONE_FINISHED = LengthTotals()


class SequenceLengths:
    """Lengths of recent steps; no sequence has more than `limit` tokens."""

    def __init__(self, limit: int):
        self._limit = limit
        self._recent: deque[np.ndarray] = deque(maxlen=RECENT)
        # Tokens of the longest sequence of recent steps, of the two longest together, and so on.
        self._longest = np.empty(0, np.int64)

    def learn(self, lengths: Lengths) -> None:
        """Take in the sequences of a finished step."""
        if lengths:
            self._recent.append(np.asarray(lengths, np.int64).sum(axis=1))
            self._longest = np.cumsum(np.sort(np.concatenate(self._recent))[::-1])

    def predict(self, unfinished: int, finished: LengthTotals = NONE_FINISHED, response: float | None = None) -> float:
        """Return the mean tokens that `unfinished` sequences of a step will have in the end, prompts included, beside
        the `finished` sequences.

        `response`: mean tokens of their responses, where a predictor gives it.
        """
        known = []
        if len(self._longest):
            share = unfinished / max(1, unfinished + finished.count)
            count = max(1, math.ceil(share * len(self._longest)))
            known.append(float(self._longest[count - 1]) / count)
        elif finished.count:
            known.append(_beyond(unfinished, finished))
        if response is not None and finished.count:
            known.append(finished.prompts / finished.count + response)
        return min(max(known, default=self._limit), self._limit)


def _beyond(unfinished: int, finished: LengthTotals) -> float:
    """Return the mean tokens of unfinished sequences. Where every response generates at one pace, unfinished responses
    are at least as long as the longest so far; by maximum likelihood for lifetimes without memory, the rest of each is
    all tokens generated so far over the responses that ended."""
    rest = (finished.responses + unfinished * finished.longest) / finished.count
    return finished.prompts / finished.count + finished.longest + rest
