"""Defines the options that driver and workers of a lean update share."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LeanOptions:
    """The parts that an update leaves out. `metrics`: of all samples as in stock verl, or of the computed samples.

    `bypass`: old log-probs are those of the rollout, not of the trained model."""

    skip_zero_gradient: bool = False
    skip_old_log_prob: bool = False
    metrics: Literal["stock", "computed"] = "stock"
    bypass: bool = False


# In a batch's extra_info: what its update leaves out, with `skip_old_log_prob` where its old log-probs are its own.
# Without it an update is verl's.
LEAN = "verl_fuse_lean"
# A row's place in the batch of its rank.
ROW_FIELD = "verl_fuse_row"
# That of a row which only carries collectives.
NO_ROW = -1
