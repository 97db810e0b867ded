"""Learn by data set which share of a response's tokens engines generate. Pure.

All tokens of a response need room in the KV cache, so predictions of `prediction.py` count all tokens. Tokens of tools
and users between the turns of an agent take no decode step, so choices by seconds count the generated share.

Invariants (tests/unit/elastic/test_turns.py):
- where every response has one turn, predictions stay as they are, to the bit;
- a data set has the share of its own samples, of which the newest step counts half;
- a data set that was not seen yet has the mean share of the others, and the share 1 before any was seen.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.timeline.generated import generated_share

# Weight of the newest step in a data set's share.
NEWEST_SHARE = 0.5


@dataclass
class GeneratedShares:
    """The share of generated tokens in all response tokens, by data set."""

    by_source: dict[str, float] = field(default_factory=dict)

    def learn(
        self, generated: Mapping[str, int], prompts: Mapping[str, Prompt], lengths: Mapping[str, Sequence[int]]
    ) -> None:
        """Take in a step: `generated` tokens and response `lengths` of the samples, by prompt uid."""
        made: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for uid, found in lengths.items():
            if uid in prompts:
                made[prompts[uid].source] += generated.get(uid, 0)
                whole[prompts[uid].source] += sum(found)
        for source, tokens in whole.items():
            share = generated_share(made[source], tokens)
            if share is not None:
                before = self.by_source.get(source, share)
                self.by_source[source] = NEWEST_SHARE * share + (1 - NEWEST_SHARE) * before

    def of(self, source: str) -> float:
        """Return the share of a data set."""
        if source in self.by_source:
            return self.by_source[source]
        return mean(self.by_source.values()) if self.by_source else 1.0

    def decoded(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return the prompts with predictions of generated tokens in place of response tokens."""
        return [self._decoded(prompt, self.of(prompt.source)) for prompt in prompts]

    def _decoded(self, prompt: Prompt, share: float) -> Prompt:
        known = prompt.prediction
        return (
            prompt
            if known is None
            else replace(prompt, prediction=Prediction(known.tokens * share, known.upper * share))
        )
