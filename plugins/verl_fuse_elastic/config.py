"""Defines the block `fuse.elastic`."""

from dataclasses import dataclass, field

from verl_fuse.spec.block import bounded, idle_while, left_to_preset, waiting


@dataclass(frozen=True)
class ElasticConfig:
    """The fields are described in verl_fuse/host/config/fuse/default.yaml."""

    enabled: bool | None = field(default=None, metadata=left_to_preset(False))
    warm_prefix_tokens: int | None = field(default=None, metadata=bounded(minimum=1))
    scale: bool = False
    cost_weight: float = field(default=0.5, metadata=bounded(minimum=0.0, maximum=1.0) | idle_while(scale=False))
    min_replicas: int = field(default=1, metadata=bounded(minimum=1) | idle_while(scale=False))
    max_replicas: int | None = field(default=None, metadata=bounded(minimum=1))
    price: float = field(default=1.0, metadata=bounded(minimum=0.0))
    start_seconds: float = field(default=0.0, metadata=bounded(minimum=0.0))
    hysteresis: float = field(default=0.05, metadata=bounded(minimum=0.0, maximum=1.0) | idle_while(scale=False))
    standalone: int = field(default=0, metadata=bounded(minimum=0))
    standalone_timeout: float = field(default=600.0, metadata=waiting() | idle_while(standalone=0))
    release: bool = False
    cut_fraction: float = field(default=1.0, metadata=bounded(minimum=0.5, maximum=1.0))
