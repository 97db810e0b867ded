"""Megatron's optimizers take parameters on the host, and put their scale factors there."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_optimizer",
    "megatron.core.optimizer.optimizer:FP32Optimizer.__init__,"
    "MixedPrecisionOptimizer.__init__,"
    "Float16OptimizerWithFloat16Params.__init__",
    "ed4be4570cbb9f9b",
    reason="loss scales are put on the device cuda, and parameters elsewhere are refused by the name of their type",
    remove_when="the optimizers take the device of the parameters",
)
