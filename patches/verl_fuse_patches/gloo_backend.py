"""verl gets one gloo backend on a CPU, where verl asks for two.

verl builds the backend string `f"cpu:gloo,{device}:{backend}"`. On a CPU both halves name the device type cpu, and
torch refuses a type that is named twice. Without its first half the string is right, so that constant is emptied:
nothing else of the two functions (Ray workers, and torchrun for verl's SFT trainer) is replaced.
"""

from types import ModuleType

from verl_fuse_patches.constants import with_constant
from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    for name in ("initialize_global_process_group", "initialize_global_process_group_ray"):
        setattr(module, name, with_constant(getattr(module, name), "cpu:gloo,", ""))


PATCH = Patch(
    name="gloo_backend",
    reason='the backend string "cpu:gloo,cpu:gloo" names the device type cpu twice; torch refuses it',
    upstream="https://github.com/verl-project/verl/issues/6237",
    target="verl.utils.distributed:initialize_global_process_group,initialize_global_process_group_ray",
    fingerprints={">=0.9.1,<0.10": "4c55bb2b77b118fe"},
    remove_when="verl leaves out the second half of the string when the device is the CPU",
    apply=apply,
)
