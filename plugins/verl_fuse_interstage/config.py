"""Defines the block `fuse.interstage`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_fuse.spec.block import COUNTS_ALWAYS, bounded, left_to_preset


@dataclass(frozen=True)
class InterstageConfig:
    """The fields are described in verl_fuse/host/config/fuse/default.yaml."""

    enabled: bool | None = field(default=None, metadata=left_to_preset(False))
    layout: Literal["shared", "slices"] | None = field(default=None, metadata=left_to_preset("shared"))
    micro_group: int = field(default=8, metadata=bounded(minimum=1))
    start_unfinished_fraction: float = field(default=1.0, metadata=bounded(minimum=0.0, maximum=1.0))
    migration_threshold: Literal["auto"] | int | float | None = field(default=None, metadata=bounded(minimum=0))
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, metadata=COUNTS_ALWAYS)
    max_queued: int = field(default=2, metadata=bounded(minimum=1))
