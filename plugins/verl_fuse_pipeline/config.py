"""Defines the block `fuse.pipeline`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import bounded, idle_while, left_to_preset, waiting


@dataclass(frozen=True)
class PipelineConfig:
    """The fields are described in verl_fuse/host/config/fuse/default.yaml."""

    enabled: bool | None = field(default=None, metadata=left_to_preset(False))
    schedule: Literal["auto", "fused", "serial"] = "auto"
    solve_seconds: float = field(default=10.0, metadata=bounded(minimum=0.1) | idle_while(schedule="serial"))
    timeout: float = field(default=600.0, metadata=waiting() | idle_while(schedule="serial"))
