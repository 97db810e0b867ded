"""Defines the block `fuse.update`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import idle_while, left_to_preset


@dataclass(frozen=True)
class UpdateConfig:
    """Described field by field in verl_fuse/host/config/fuse/default.yaml."""

    skip_zero_gradient: bool | None = field(default=None, metadata=left_to_preset(False))
    skip_old_log_prob: bool | None = field(default=None, metadata=left_to_preset(False))
    skip_values: bool | None = field(default=None, metadata=left_to_preset(False))
    balance: bool | None = field(default=None, metadata=left_to_preset(False))
    share_prompts: bool | None = field(default=None, metadata=left_to_preset(False))
    response_logits: bool | None = field(default=None, metadata=left_to_preset(False))
    stream: bool = False
    metrics: Literal["stock", "computed"] | None = field(
        default=None,
        metadata=left_to_preset("stock") | idle_while(skip_zero_gradient=False, skip_old_log_prob=False),
    )
