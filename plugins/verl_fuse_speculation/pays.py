"""Decide where a draft pays: how likely the acceptance of a drafted token must be so that trying the token shortens the
rollout.

A pass takes `fixed + each * tokens` seconds. A token that is tried costs `each`; a token that is accepted saves the
cost of a token at the present speed. On a device that is busy with many samples both are the same and nothing is
drafted; where few samples are left, `each` is small beside `fixed`.

Invariants (tests/unit/speculation/test_pays.py):
- the costs of passes that follow the formula are found, whatever their values, even if some passes waited for
  something else;
- on a busy device nothing is drafted, on an idle device everything that may be accepted;
- drafts that are accepted less often than their votes say need more votes.
"""

from dataclasses import dataclass, field

import numpy as np

from verl_fuse.spec.arrays import Floats

# The share of a pass's weight that is left one pass later.
KEPT = 0.99
# Costs are known after so many passes.
NEEDED = 16
# A pass counts as at most so many times as long as its tokens let expect: the rest waited for something else.
MOST_DELAYED = 2.0
# A draft less likely than this is not worth the host's time, whatever the device costs.
NEVER = 0.05


@dataclass
class Pays:
    """The recent cost of passes, and how often drafts were accepted."""

    _sums: Floats = field(default_factory=lambda: np.zeros(5))
    _speed: float = 0.0
    _expected: float = 1.0
    _accepted: float = 1.0

    def observe(self, seconds: float, rows: int, tried: int, accepted: int, expected: float) -> None:
        """Take in a pass of `rows` samples and `tried` drafted tokens, of which `accepted` were accepted and `expected`
        should have been; the pass took `seconds`."""
        tokens = rows + tried
        if self.costs is not None:
            # Else one pass that waited would move the costs for a hundred passes.
            fixed, each = self.costs
            seconds = min(seconds, MOST_DELAYED * (fixed + each * tokens))
        self._sums *= KEPT
        self._sums += (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._speed = (rows + accepted) / seconds
        if tried:
            self._expected = KEPT * self._expected + expected
            self._accepted = KEPT * self._accepted + accepted

    @property
    def costs(self) -> tuple[float, float] | None:
        """Return the seconds of a pass, and of each token in the pass; None before they are known."""
        count, tokens, seconds, squares, products = self._sums
        spread = count * squares - tokens * tokens
        if count < (1 - KEPT**NEEDED) / (1 - KEPT) or spread <= 1e-9 * squares:
            return None
        each = max((count * products - tokens * seconds) / spread, 0.0)
        fixed = (seconds - each * tokens) / count
        return (fixed, each) if fixed > 0 else (0.0, seconds / tokens)

    @property
    def least(self) -> float:
        """Return how often a drafted token must be accepted, by its votes, to be worth trying."""
        if self.costs is None:
            return NEVER
        _, each = self.costs
        return min(max(each * self._speed * self._expected / max(self._accepted, 1e-9), NEVER), 1.0)
