"""Defines the block `fuse.realloc`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import idle_while, left_to_preset, waiting


@dataclass(frozen=True)
class ReallocConfig:
    """The fields are described in verl_fuse/host/config/fuse/default.yaml."""

    weight_sync: Literal["stock", "shards"] | None = field(default=None, metadata=left_to_preset("stock"))
    timeout: float = field(default=300.0, metadata=waiting() | idle_while(weight_sync="stock"))
    checksums: bool = field(default=False, metadata=idle_while(weight_sync="stock"))
