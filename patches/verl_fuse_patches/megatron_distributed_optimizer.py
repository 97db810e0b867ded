"""The distributed optimizer takes parameters on the host."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_distributed_optimizer",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    "a898357cd585e3e6",
    reason="parameters anywhere else than on CUDA are refused by the name of their type",
    remove_when="parameters are told apart by their dtype",
)
