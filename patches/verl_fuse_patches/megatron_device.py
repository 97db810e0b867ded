"""Megatron's current device is the host.

Megatron asks `torch.cuda` for the current device for every buffer, and waits for CUDA around messages between stages.
In a process that trains with Megatron on a CPU, the device is "cpu", and there is nothing to wait for.
"""

from types import ModuleType

from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    import torch

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None


PATCH = Patch(
    name="megatron_device",
    reason="buffers are made on torch.cuda.current_device(), which a torch without CUDA does not have",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/p2p_communication.py",
    target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes,P2PCommunicator._communicate",
    fingerprints={"==0.16.1": "0ee4cb15b76f8b21"},
    remove_when="Megatron asks for the device of what it works on",
    apply=apply,
)
