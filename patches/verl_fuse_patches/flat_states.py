"""Lets FSDP1 broadcast a module's states between hosts' memories.

verl builds FSDP1 with `sync_module_states=True`: ranks above 0 begin without weights and get those of rank 0. torch
refuses states on the CPU, because NCCL could not broadcast them. The broadcast itself is the process group's: gloo's
works. So the check is left out; everything else of the broadcast is torch's.
"""

from verl_fuse_patches.registry import Patch, around

PATCH = Patch(
    name="flat_states",
    reason="FSDP1 refuses to broadcast weights that are on the CPU, which gloo can",
    upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_init_utils.py",
    target="torch.distributed.fsdp._init_utils:_check_module_states_for_sync_module_states",
    fingerprints={">=2.11,<2.14": "3fe23eb1468a7393"},
    remove_when="torch lets a process group that serves the CPU broadcast a module's states",
    # States on any device are accepted.
    apply=around({"_check_module_states_for_sync_module_states": lambda original, module_states: None}),
)
