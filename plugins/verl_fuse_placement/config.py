"""The block `fuse.placement`."""

from dataclasses import dataclass, field
from typing import Literal

from verl_fuse.spec.block import bounded, idle_while


@dataclass(frozen=True)
class DeviceRange:
    """Training devices: so many `devices` from number `first` on."""

    first: int = field(metadata=bounded(minimum=0))
    devices: int = field(metadata=bounded(minimum=1))


@dataclass(frozen=True)
class PlacementConfig:
    """Described field by field in verl_fuse/host/config/fuse/default.yaml."""

    critic: DeviceRange | Literal["auto"] | None = None
    defer: bool = field(default=False, metadata=idle_while(critic=None))
