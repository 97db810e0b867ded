"""A weight sender holds a shared lock on its buffer in /dev/shm for as long as the sender lives.

A killed run leaves its buffers behind, and without a lock nobody can tell them from the buffers of a run in another
container. The kernel drops the lock with the process, so verl_fuse_cpu.leftovers removes only buffers that it can lock
for itself.
"""

import fcntl
from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def create_shared_memory(original: Callable[..., Any], size: int, name: str) -> Any:
    memory = original(size, name)
    fcntl.flock(memory._fd, fcntl.LOCK_SH)
    return memory


PATCH = Patch(
    name="weight_buffer_lock",
    reason="killed runs leave buffers in /dev/shm that cannot be told from those in use",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py",
    target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:create_shared_memory",
    fingerprints={">=0.9.1,<0.10": "96956b47f980b6fe"},
    remove_when="verl removes the shared memory of dead runs itself",
    apply=around({"create_shared_memory": create_shared_memory}),
)
