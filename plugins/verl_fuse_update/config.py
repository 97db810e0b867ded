"""The block `fuse.update`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import idle_while


@dataclass(frozen=True)
class UpdateConfig:
    """Described field by field in verl_fuse/host/config/fuse/default.yaml."""

    skip_zero_gradient: bool = False
    skip_old_log_prob: bool = False
    metrics: Literal["stock", "computed"] = field(
        default="stock", metadata=idle_while(skip_zero_gradient=False, skip_old_log_prob=False)
    )
