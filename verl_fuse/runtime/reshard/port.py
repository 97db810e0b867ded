"""Connects a rank to the others in a transfer: by a process group of its own, which may join processes of several
worlds.

Invariants (tests/unit/runtime/test_transfer_executor.py):
- messages between two ranks arrive in the order in which they were sent;
- a broken connection is a `LostPeer`, never a wrong message.
"""

from typing import Any

import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.gloo import GlooPort
from verl_fuse.runtime.links import MESSAGE_TIMEOUT
from verl_fuse.runtime.nccl import NcclPort
from verl_fuse.runtime.port import Port

# A receive may be posted long before its message is sent; the watch bounds how long a rank makes no progress.
BACKENDS = ("gloo", "nccl")


def open_port(store: Any, rank: int, size: int, backend: str) -> Port:
    """Join the process group of a transfer: `size` processes call this with the same backend and a store prefix
    that was never used before."""
    if backend not in BACKENDS:
        raise FuseError(f"backend={backend!r}; transfers run on {', '.join(BACKENDS)}")
    if backend == "gloo":
        return GlooPort(dist.ProcessGroupGloo(store, rank, size, MESSAGE_TIMEOUT), range(size))
    if not dist.is_nccl_available():
        raise FuseError("backend='nccl'; this torch was built without it")
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = MESSAGE_TIMEOUT
    group = dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportAttributeAccessIssue]
    return NcclPort(group, range(size))
