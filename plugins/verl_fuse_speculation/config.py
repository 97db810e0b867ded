"""The block `fuse.speculation`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import bounded, left_to_preset


@dataclass(frozen=True)
class SpeculationConfig:
    """The fields are described in verl_fuse/host/config/fuse/default.yaml."""

    enabled: bool | None = field(default=None, metadata=left_to_preset(False))
    tokens: Literal["auto"] | int = field(default="auto", metadata=bounded(minimum=1, maximum=32))
    epochs: int = field(default=2, metadata=bounded(minimum=0))
    history_megabytes: int = field(default=256, metadata=bounded(minimum=1))
