"""Weights of a run go through sockets of its own, also where another run with a Ray cluster of its own is on the host.

verl names the socket of a rollout worker by Ray's job, and every cluster's first job has the same number: of two runs
on one host, one removes the other's socket, or a receiver takes the other run's weights. The patch adds the process
number of the cluster's raylet to the name; sender and receiver of a socket are on one node, and below one raylet.
"""

import os
from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around

# Ray gives it to every worker; the processes of an engine inherit it.
RAYLET_VARIABLE = "RAY_RAYLET_PID"
_SUFFIX = ".sock"


def own_handle(handle: str) -> str:
    """Return the handle with this process's raylet in its name; a process outside Ray keeps the handle."""
    raylet = os.environ.get(RAYLET_VARIABLE)
    return handle if raylet is None else f"{handle.removesuffix(_SUFFIX)}-raylet-{raylet}{_SUFFIX}"


def with_own_handle(original: Callable[..., None], self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
    original(self, own_handle(zmq_handle), *args, **kwargs)


_TARGET = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
_ENDS = ("BucketedWeightSender.__init__", "BucketedWeightReceiver.__init__")

PATCH = Patch(
    name="weight_socket_name",
    reason="two runs on one host, each with a Ray cluster of its own, send weights through the same sockets",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/rollout/vllm_rollout/vllm_rollout.py",
    target=f"{_TARGET}:{','.join(_ENDS)}",
    fingerprints={">=0.9.1,<0.10": "aea81728499f69c3"},
    remove_when="verl's name of the socket differs between clusters on one host",
    apply=around(dict.fromkeys(_ENDS, with_own_handle)),
)
