"""Which prompt a sample belongs to, told from its tokens alone: vLLM's drafters see neither prompts nor requests.

Invariants (tests/unit/speculation/test_prompts.py):
- samples of one prompt are one group, here and in what another replica wrote;
- a sample that goes on elsewhere, with the tokens it has as its prompt, stays in its group where its prompt is known.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from verl_fuse.spec.arrays import Tokens


class PromptDigest(NamedTuple):
    """A prompt by its number of tokens and a digest of them."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, tokens: Tokens) -> "PromptDigest":
        """The prompt with these tokens."""
        return cls(len(tokens), blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest())


class Prompts:
    """The prompts that were met, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[PromptDigest, int] = {}
        # How many prompts there are of each length.
        self._lengths: dict[int, int] = {}

    def number(self, prompt: PromptDigest) -> int:
        """The group of samples of `prompt`."""
        if prompt not in self._numbers:
            self._numbers[prompt] = len(self._numbers)
            self._lengths[prompt.length] = self._lengths.get(prompt.length, 0) + 1
        return self._numbers[prompt]

    def find(self, tokens: Tokens) -> PromptDigest:
        """The longest prompt that was met and begins `tokens`; all of them, where there is none."""
        for length in sorted((found for found in self._lengths if found <= len(tokens)), reverse=True):
            prompt = PromptDigest.of(tokens[:length])
            if prompt in self._numbers:
                return prompt
        return PromptDigest.of(tokens)
