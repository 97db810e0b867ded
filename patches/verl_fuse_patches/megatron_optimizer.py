"""Megatron's optimizers take parameters on the host, and put their scale factors there."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = (
    "FP32Optimizer.__init__",
    "MixedPrecisionOptimizer.__init__",
    "Float16OptimizerWithFloat16Params.__init__",
)

PATCH = Patch(
    name="megatron_optimizer",
    reason="loss scales are put on the device cuda, and parameters elsewhere are refused by the name of their type",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/optimizer.py",
    distributions=("megatron-core",),
    target="megatron.core.optimizer.optimizer:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "ed4be4570cbb9f9b"},
    remove_when="the optimizers take the device of the parameters",
    apply=on_host(FUNCTIONS),
)
