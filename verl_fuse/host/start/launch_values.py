"""Checks values with which verl's workers end when they are up, or its first update: numbers that must be 1 or more, a
rollout that its devices do not divide into, a mode of it that is gone, and estimators of the KL divergence.

Invariant (tests/unit/host/test_launch_values.py): a configuration refused here ends in verl 0.9.1
(verl/workers/config/rollout.py, verl/workers/engine_workers.py, verl/trainer/ppo/core_algos.py).
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_fuse.spec.block import nearest
from verl_fuse.spec.composed import (
    ACTOR,
    ROLLOUT,
    getter,
    is_count,
    is_legacy,
    product,
    replica_devices,
)
from verl_fuse.spec.step import Refusal

# Each of them at 0 leaves no device, no sample or no token.
_AT_LEAST_ONE = (
    *("trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size"),
    *("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n", f"{ROLLOUT}.tensor_model_parallel_size"),
)
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# The key of the estimator, by the switch that computes it.
_KL_KEYS = {f"{ACTOR}.use_kl_loss": f"{ACTOR}.kl_loss_type", "algorithm.use_kl_in_reward": "algorithm.kl_penalty"}


def value_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse numbers below 1, a rollout that does not divide the devices, a mode of it that is gone, and an estimator
    of the KL divergence that verl has not."""
    get = getter(config)
    if is_legacy(config):
        return
    for key in _AT_LEAST_ONE:
        if isinstance(value := get(key), int) and value < 1:
            yield Refusal(key, value, "needs a whole number >= 1")
    if get(f"{ROLLOUT}.mode") == "sync":
        yield Refusal(f"{ROLLOUT}.mode", "sync", "verl 0.9.1 has no such mode any more; allowed: async")
    devices = product(get, "trainer", ("nnodes", "n_gpus_per_node"))
    if devices and is_count(get(f"{ROLLOUT}.tensor_model_parallel_size")) and devices % replica_devices(get):
        allowed = f"a replica has {replica_devices(get)} devices: needs a divisor of the run's {devices}"
        yield Refusal(f"{ROLLOUT}.tensor_model_parallel_size", get(f"{ROLLOUT}.tensor_model_parallel_size"), allowed)
    for switch, key in _KL_KEYS.items():
        # With a + at its end verl takes the gradient of k2.
        if get(switch) is True and isinstance(kl := get(key), str) and kl.removesuffix("+") not in _KL:
            yield Refusal(key, kl, f"verl has no such estimator{nearest(kl, _KL)}; allowed: {', '.join(_KL)}")
