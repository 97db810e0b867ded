"""Megatron's pipeline schedules count tokens on the device that training runs on, not always on CUDA."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_schedules",
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining,"
    "forward_backward_pipelining_with_interleaving,"
    "forward_backward_pipelining_without_interleaving",
    "249ffa9390960ea0",
    reason="the schedules put their token counter on the device cuda",
    remove_when="the schedules take the device of the model",
)
