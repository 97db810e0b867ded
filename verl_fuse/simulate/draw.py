"""Draws the lengths of one step from a workload.

Invariants (tests/unit/simulate/test_draw.py):
- responses follow the workload's distribution exactly, whatever the predictability;
- all samples of a prompt share its prompt length and its predicted length;
- at predictability 1 the order of predictions is the order of lengths.
"""

import math
from dataclasses import dataclass

import numpy as np
from numba import vectorize

from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.workload import Workload


@dataclass(frozen=True, eq=False)
class DrawnLengths:
    """The lengths of each sample, in verl's order (the samples of a prompt together): its prompt's number, lengths in
    tokens, and the predicted response."""

    group: Ints
    prompt: Ints
    response: Ints
    predicted: Ints


def draw(workload: Workload, rng: np.random.Generator, predictability: float) -> DrawnLengths:
    """Draw one step. A prompt has a usual length; a response's length correlates with it by `predictability` (Gaussian
    copula)."""
    group = np.repeat(np.arange(workload.prompts), workload.samples)
    prompt = workload.prompt.sample(rng, workload.prompts)[group]
    usual = rng.standard_normal(workload.prompts)[group]
    score = predictability * usual + math.sqrt(1 - predictability**2) * rng.standard_normal(workload.sequences)
    return DrawnLengths(group, prompt, _at(workload.response, score), _at(workload.response, predictability * usual))


def _at(lengths: LengthDistribution, score: Floats) -> Ints:
    """Return the quantiles of standard normal scores."""
    cumulative = np.cumsum(lengths.probabilities)[:-1]
    return np.asarray(lengths.values, np.int64)[np.searchsorted(cumulative, _normal(score), side="right")]


@vectorize(["float64(float64)"], cache=True)
def _normal(score):
    return 0.5 * math.erfc(-score / math.sqrt(2.0))
