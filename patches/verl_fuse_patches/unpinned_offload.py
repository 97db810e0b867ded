"""Lets FSDP2's CPU offload work without pinned memory, which only an accelerator provides.

verl gives every forward-only engine (the reference) `CPUOffloadPolicy(pin_memory=True)`. Pinning raises where
there is no accelerator; the policy itself works on a CPU, where its copies are no-ops. The engine's module gets
a policy that never pins.
"""

from types import ModuleType

from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    policy = module.CPUOffloadPolicy

    def unpinned(pin_memory: bool = True) -> object:
        return policy(pin_memory=False)

    module.CPUOffloadPolicy = unpinned  # type: ignore[attr-defined]


PATCH = Patch(
    name="unpinned_offload",
    reason="the reference engine pins memory, which raises without an accelerator",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine/fsdp/transformer_impl.py",
    target="verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module",
    fingerprints={">=0.9.1,<0.10": "5ffee7368a4f90a5"},
    remove_when="verl pins offloaded parameters only where the platform has pinned memory",
    apply=apply,
)
