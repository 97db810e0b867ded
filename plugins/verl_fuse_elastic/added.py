"""Assign the prompts that a running step asks for in place of discarded prompts (verl, replay_buffer.py `sample`).
Pure.

Invariants (tests/unit/elastic/test_added.py):
- every added prompt gets one replica, and no other prompt moves;
- the longest prompt is placed first; each goes to the replica that is done earliest with the prompt and its running
  samples, and of equal replicas to the one with fewer tokens left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.assignment import TOKENS_ALONE, UNKNOWN_LENGTH


@dataclass(frozen=True, slots=True)
class Load:
    """The tokens that a replica has left to generate: all tokens, and the tokens of the longest sample. A running
    sample counts in full, with no token generated yet."""

    tokens: float = 0.0
    longest: float = 0.0

    def plus(self, prompt: Prompt, limit: float) -> "Load":
        prediction: Prediction = prompt.prediction or UNKNOWN_LENGTH
        tokens = self.tokens + prompt.samples * max(prediction.tokens, 1.0)
        return Load(tokens, max(self.longest, min(limit, prediction.upper)))

    def seconds(self, slots: int, cost: DecodeCost) -> float:
        """Return seconds as `assignment.Line.seconds` counts them, with the upper prediction for the longest sample."""
        return cost.step * max(self.longest, self.tokens / slots) + cost.sequence * self.tokens


def add(
    prompts: Sequence[Prompt],
    running: Mapping[int, Sequence[Prompt]],
    slots: int,
    cost: DecodeCost = TOKENS_ALONE,
    limit: float = math.inf,
) -> Mapping[str, int]:
    """Return the replica rank of each prompt uid, given the prompts `running` on each rank. `slots`: sequences that a
    replica runs at once; `limit`: tokens of a response."""
    loads = {rank: Load() for rank in running}
    for rank, left in running.items():
        for prompt in left:
            loads[rank] = loads[rank].plus(prompt, limit)
    homes = {}
    for prompt in sorted(prompts, key=lambda prompt: Load().plus(prompt, limit).tokens, reverse=True):
        after = {rank: load.plus(prompt, limit) for rank, load in loads.items()}
        rank = min(after, key=lambda rank: (after[rank].seconds(slots, cost), after[rank].tokens, rank))
        homes[prompt.uid], loads[rank] = rank, after[rank]
    return homes
