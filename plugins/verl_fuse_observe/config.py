"""Defines the block `fuse.observe`."""

from dataclasses import dataclass, field

from verl_fuse.spec.block import bounded, idle_while


@dataclass(frozen=True)
class ObserveConfig:
    """The fields are described in plugins/verl_fuse_observe/README.md."""

    enabled: bool = True
    html: bool = True
    perfetto: bool = True
    progress: bool = True
    progress_interval: float = field(
        default=10.0, metadata=bounded(minimum=0.1, maximum=3600.0) | idle_while(progress=False)
    )
    keep_steps: int | None = field(default=100, metadata=bounded(minimum=1))
