"""A distributed optimizer goes on from a checkpoint without Transformer Engine and Apex, whose Adam keeps its count of
steps elsewhere than torch's Adam.

Megatron reads the number of steps off the optimizer's state, which torch's Adam has only after its first step: a fresh
process cannot load a checkpoint. And the loaded state counts the steps of the process that loads, or has one counter
for all weights. The patch makes the state before Megatron asks for it, like the first step would, and every weight gets
a counter of its own with the steps that were loaded.
"""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def with_state(original: Callable[..., Any], self: Any) -> Any:
    import torch

    if not self.optimizer.state:
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                zeros = {name: torch.zeros_like(weight.data) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[weight] = {"step": torch.tensor(0.0), **zeros}
    return original(self)


def with_counters(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    original(self, *args, **kwargs)
    for group in self.optimizer.param_groups:
        for weight in group["params"]:
            self.optimizer.state[weight]["step"] = torch.tensor(float(group["step"]))


PATCH = Patch(
    name="megatron_adam_state",
    reason="a fresh process cannot load a checkpoint, or forgets how many steps there were",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py",
    target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict,DistributedOptimizer.load_state_dict",
    fingerprints={"==0.16.1": "0a2061494b87e4f7"},
    remove_when="Megatron loads torch's Adam as it saves it",
    apply=around(
        {"DistributedOptimizer.state_dict": with_state, "DistributedOptimizer.load_state_dict": with_counters}
    ),
)
