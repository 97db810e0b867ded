"""Prices decoding with drafts (`fuse.speculation`): a pass verifies drafted tokens, and brings the accepted tokens and
one more.

Invariants (tests/unit/simulate/test_drafts.py):
- where drafts alone cost time, no batch decodes slower with them: as many are drafted as shorten it most;
- the acceptance is found again from the counts of a run with drafts.
"""

from collections.abc import Callable

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.simulate.timing import DecodeSeconds
from verl_fuse.spec.arrays import Floats

MOST_DRAFTED = 8
"""Tokens drafted for a sample in one pass at most: what `fuse.speculation.tokens=auto` drafts."""


def tokens_per_pass(acceptance: float, drafted: float) -> float:
    """Return the tokens that a sample gets in a pass with so many drafted tokens; each is accepted with probability
    `acceptance` once the tokens before it were."""
    return drafted + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (drafted + 1.0)) / (1.0 - acceptance)


def with_drafts(verify: Callable[[Floats, int, Floats], Floats], acceptance: float) -> DecodeSeconds:
    """Return the seconds in which each sample of an engine gets a token, by the seconds that a pass takes to verify so
    many drafted tokens of each of its sequences."""

    def seconds(sequences: Floats, tokens: Floats) -> Floats:
        counts = range(MOST_DRAFTED + 1)
        tried = [verify(sequences, count, tokens) / tokens_per_pass(acceptance, count) for count in counts]
        return np.minimum.reduce(tried)

    return seconds


def acceptance_of(passes_tokens: float, accepted_share: float) -> float:
    """Return the acceptance with which a pass brings a sample `passes_tokens` tokens where the share `accepted_share`
    of all drafted tokens is accepted."""
    if not (passes_tokens > 1.0 and 0.0 < accepted_share <= 1.0):
        raise FuseError(
            f"tokens per pass {passes_tokens:g}, accepted {accepted_share:g}: needs more than 1, and a share above 0"
        )
    drafted, low, high = (passes_tokens - 1.0) / accepted_share, 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, drafted) < passes_tokens else (low, middle)
    return (low + high) / 2
