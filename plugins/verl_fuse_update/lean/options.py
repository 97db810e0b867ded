"""Defines the options that driver and workers of a lean update share."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LeanOptions:
    """The parts that an update leaves out. `metrics`: of all samples as in stock verl, or of the computed samples.

    `bypass`: old log-probs are those of the rollout, not of the trained model. `short_pass`: the old log-prob pass
    leaves out samples without a gradient, and ratios of theirs in the update are 1."""

    skip_zero_gradient: bool = False
    skip_old_log_prob: bool = False
    metrics: Literal["stock", "computed"] = "stock"
    bypass: bool = False
    short_pass: bool = False


# The key under which a batch's extra_info has the LeanOptions of its update; without the key the update is verl's.
# `skip_old_log_prob` is set there where the first mini-batch computes its own old log-probs.
LEAN = "verl_fuse_lean"
# The field with a row's place in the batch of its rank.
ROW_FIELD = "verl_fuse_row"
# The place of a row that only carries collectives.
NO_ROW = -1
