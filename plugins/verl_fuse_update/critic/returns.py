"""Computes returns of a micro-batch from values that its own forward pass has just computed.

A return of generalized advantage estimation needs rewards and values of its own response alone.

Invariant (tests/unit/update/test_returns.py, tests/integration/test_own_values.py): rewards and returns of tokens that
count are verl's (`apply_kl_penalty`, `compute_gae_advantage_return`), returns up to rounding.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch.nn.functional import pad
from verl.trainer.ppo.core_algos import kl_penalty


@dataclass(frozen=True)
class Rewards:
    """The numbers by which a step makes returns of scores: the discount `gamma`, and `lam` of the estimate. `penalty`
    names the estimate of KL in the reward (None: there is no KL in the reward), `coefficient` weighs it."""

    gamma: float
    lam: float
    penalty: str | None = None
    coefficient: float = 0.0

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the columns that returns are made of, beside values."""
        return ("rm_scores", "response_mask", *(("old_log_probs", "ref_log_prob") if self.penalty else ()))


@torch.no_grad()
def returns_of(data: TensorDict, values: torch.Tensor, rewards: Rewards) -> torch.Tensor:
    """Return the returns, (rows, tokens of the longest response); `data` has nested columns of responses, `values` is
    nested as well."""
    padded = data.select(*rewards.fields).to_padded_tensor()
    mask, scores = padded["response_mask"], padded["rm_scores"]
    if rewards.penalty:
        found = kl_penalty(padded["old_log_probs"], padded["ref_log_prob"], rewards.penalty)
        scores = scores - rewards.coefficient * (found * mask)
    return estimated(scores, values.to_padded_tensor(0.0), mask, rewards.gamma, rewards.lam)


def estimated(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return values plus generalized advantages, 0 for tokens that do not count; all are (rows, tokens), and `mask` is
    1 for tokens that count. Sums are of float64, discounts of values have the precision of verl's."""
    counts = mask.bool()
    # Tokens that do not count, such as a tool's, are skipped: those that count are moved to the front, in their order.
    order = torch.argsort((~counts).to(torch.int8), dim=1, stable=True)
    counted = counts.gather(1, order)
    # verl discounts in the precision of values and mask. In bfloat16 that moves returns by more than a sum's rounding.
    own = values.gather(1, order) * mask.gather(1, order)
    following = (gamma * pad(own[:, 1:], (0, 1))).double()
    value, reward = own.double(), rewards.double().gather(1, order) * counted
    errors = reward + following - value
    found = (_discounted(errors * counted, gamma * lam) + value) * counted
    return torch.zeros_like(found).scatter(1, order, found).to(rewards.dtype)


def _discounted(terms: torch.Tensor, factor: float) -> torch.Tensor:
    """Return for each place its term plus `factor` times the sum of the next place, (rows, places): sums of twice as
    many terms in each turn."""
    sums, reach = terms, 1
    while reach < terms.shape[1]:
        sums = sums + factor**reach * pad(sums[:, reach:], (0, reach))
        reach *= 2
    return sums
