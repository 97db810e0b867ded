"""Megatron's pipeline schedules count tokens on the device that training runs on, not always on CUDA."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

PATCH = Patch(
    name="megatron_schedules",
    reason="the schedules put their token counter on the device cuda",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/schedules.py",
    distributions=("megatron-core",),
    target="megatron.core.pipeline_parallel.schedules:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "249ffa9390960ea0"},
    remove_when="the schedules take the device of the model",
    apply=on_host(FUNCTIONS),
)
