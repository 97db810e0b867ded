"""The distributed optimizer takes parameters on the host."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = ("DistributedOptimizer._build_model_and_main_param_groups",)

PATCH = Patch(
    name="megatron_distributed_optimizer",
    reason="parameters anywhere else than on CUDA are refused by the name of their type",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py",
    distributions=("megatron-core",),
    target="megatron.core.optimizer.distrib_optimizer:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "a898357cd585e3e6"},
    remove_when="parameters are told apart by their dtype",
    apply=on_host(FUNCTIONS),
)
