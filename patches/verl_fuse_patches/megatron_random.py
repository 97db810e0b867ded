"""Megatron's tracker of random numbers does without CUDA.

The tracker keeps states of CUDA's generators, one per parallel group, for dropout. Megatron's tracker for inference
keeps no state and leaves the host's generator in charge, from which training without dropout never draws.
"""

from types import ModuleType

from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    import torch

    # A later call finds the tracker initialised.
    module.initialize_rng_tracker(inference_rng_tracker=True)
    # verl saves the states with a checkpoint and refuses to load a checkpoint without any; verl saves the host's own
    # state as well.
    module.get_cuda_rng_tracker().get_states = lambda: {"host": torch.get_rng_state()}


PATCH = Patch(
    name="megatron_random",
    reason="random states of CUDA are read when a model is seeded",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/random.py",
    target="megatron.core.tensor_parallel.random:initialize_rng_tracker,model_parallel_cuda_manual_seed",
    fingerprints={"==0.16.1": "58419a493aead8bc"},
    remove_when="Megatron tracks states of the generator of the device that training runs on",
    apply=apply,
)
