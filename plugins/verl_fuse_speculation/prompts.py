"""Tell the prompt that a sample belongs to from its tokens alone: vLLM's drafters see neither prompts nor requests.

A digest of tokens is made token by token, so that one walk over a sample has the digests of all its beginnings.

Invariants (tests/unit/speculation/test_prompts.py):
- samples of one prompt are one group, here and in the files of another replica;
- a sample that goes on elsewhere, with its tokens so far as its prompt, stays in its group where its prompt is known;
- a prompt is found in one walk over the tokens, however many prompts there are;
- a prompt that is forgotten takes no memory.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit

from verl_fuse.spec.arrays import Tokens

_DIGEST = struct.Struct("<QQ")


class PromptDigest(NamedTuple):
    """A prompt by its number of tokens and a digest of its tokens."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, tokens: Tokens) -> "PromptDigest":
        """Return the digest of the prompt with these tokens."""
        (digest,) = beginnings(tokens, np.zeros(1, np.int32))
        return digest


class Prompts:
    """The prompts that were met, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[PromptDigest, int] = {}
        self._next = 0
        # The number of prompts of each length.
        self._known = np.zeros(1024, np.int32)

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, prompt: PromptDigest) -> int:
        """Return the number of the group of samples of `prompt`."""
        if prompt not in self._numbers:
            self._numbers[prompt] = self._next
            self._next += 1
            if prompt.length >= len(self._known):
                self._known = np.concatenate([self._known, np.zeros(prompt.length, np.int32)])
            self._known[prompt.length] += 1
        return self._numbers[prompt]

    def find(self, tokens: Tokens) -> PromptDigest:
        """Return the longest prompt that was met and begins `tokens`; all of `tokens`, where there is none."""
        found = beginnings(tokens, self._known)
        return next((prompt for prompt in reversed(found) if prompt in self._numbers), found[-1])

    def forget(self, groups: Iterable[int]) -> None:
        """Leave out these groups; their numbers are not used again."""
        gone = set(groups)
        for prompt in [prompt for prompt, group in self._numbers.items() if group in gone]:
            del self._numbers[prompt]
            self._known[prompt.length] -= 1


def beginnings(tokens: Tokens, known: np.ndarray) -> list[PromptDigest]:
    """Return digests of the beginnings of `tokens` whose lengths are `known` (above 0 at that place), the shortest
    first; the last digest is of all tokens."""
    lengths, one, other = _digests(np.ascontiguousarray(tokens, np.int32), known)
    return [
        PromptDigest(length, _DIGEST.pack(*halves))
        for length, *halves in zip(lengths.tolist(), one.tolist(), other.tolist(), strict=True)
    ]


@njit(cache=True, nogil=True)
def _digests(tokens, known):  # type: ignore[no-untyped-def]
    count = len(tokens)
    lengths = np.empty(min(count, len(known)) + 1, np.int64)
    ones, others = np.empty(len(lengths), np.uint64), np.empty(len(lengths), np.uint64)
    one, other, found = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), 0
    for place in range(count):
        token = np.uint64(np.uint32(tokens[place]))
        one = (one ^ token) * np.uint64(0xD6E8FEB86659FD93)
        one ^= one >> np.uint64(32)
        other = (other + token) * np.uint64(0xFF51AFD7ED558CCD)
        other ^= other >> np.uint64(29)
        length = place + 1
        if length < count and length < len(known) and known[length] > 0:
            lengths[found], ones[found], others[found] = length, one, other
            found += 1
    lengths[found], ones[found], others[found] = count, one, other
    return lengths[: found + 1], ones[: found + 1], others[: found + 1]
