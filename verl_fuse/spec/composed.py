"""Reads the composed configuration of a run, verl's with the block `fuse`, and finds the keys that cannot run.

Invariant (tests/unit/spec/test_composed.py): a key that is not there is read as None, and no key is ever written.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.spec.block import written
from verl_fuse.spec.step import Refusal

# The blocks of a run's models and of its rollout.
ACTOR, REFERENCE, ROLLOUT, CRITIC = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic",
)
MODEL = "actor_rollout_ref.model"
# A model whose config.json has one of these reads images or sound.
TOWERS = ("vision_config", "audio_config", "thinker_config")

Get = Callable[[str], Any]
# Key: the value that the key needs, and the words about any other value.
Needs = Mapping[str, tuple[Any, str]]


def getter(config: Mapping[str, Any]) -> Get:
    """Return a function that returns a value by dotted key; None where there is no such key."""
    return lambda key: OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]


def required(get: Get, needs: Needs) -> Iterator[Refusal]:
    """Refuse keys that do not have the value they need."""
    for key, (value, allowed) in needs.items():
        if get(key) != value:
            yield Refusal(key, get(key), allowed, {key: value})


def required_if_set(get: Get, needs: Needs) -> Iterator[Refusal]:
    """Refuse keys that have another value than they need; unset, false, 0 and empty are no values."""
    return required(lambda key: get(key) or needs[key][0], needs)


def off_beside(get: Get, feature: str, off: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse keys, beside `feature` (KEY=VALUE), that have another value than the one in `off`; unset, false, 0 and
    empty are no values."""
    return required_if_set(get, {key: (value, f"{feature} needs {written(value)}") for key, value in off.items()})


def on_accelerators(get: Get) -> bool:
    """Tell whether the devices that verl uses are accelerators, and not the host (`trainer.device=cpu`)."""
    return get("trainer.device") != "cpu"


def is_legacy(config: Mapping[str, Any]) -> bool:
    """Tell whether verl's trainer before V1 runs, by verl's rule (verl.trainer.main_ppo); it reads other keys."""
    trainer = getter(config)("trainer")
    return isinstance(trainer, Mapping) and "use_v1" in trainer and not trainer["use_v1"]


def is_validation_only(get: Get) -> bool:
    """Tell whether the run ends before its first step (`PPOTrainer.fit`)."""
    return bool(get("trainer.val_only")) and get("trainer.val_before_train") is not False


def has_critic(get: Get) -> bool:
    """Tell whether the run has a critic, by verl's rule (verl.trainer.ppo.utils.need_critic)."""
    enabled = get("critic.enable")
    return get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def no_critic(get: Get) -> str | None:
    """Return a reason to leave alone what changes a critic's work: there is no critic."""
    return None if has_critic(get) else "there is no critic"


def one_replica(get: Get) -> str | None:
    """Return a reason to leave alone what chooses between rollout replicas: there is one."""
    devices = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        devices //= get(f"{ROLLOUT}.{size}") or 1
    return "there is one rollout replica" if devices < 2 else None


def has_adapters(get: Get) -> bool:
    """Tell whether the reference is the policy without its adapters, by verl's rule (`PPOTrainer.ref_in_actor`)."""
    return bool((get(f"{MODEL}.lora.rank") or 0) > 0 or (get(f"{MODEL}.lora_rank") or 0) > 0) or (
        get(f"{MODEL}.lora_adapter_path") is not None
    )


def has_reference(get: Get) -> bool:
    """Tell whether the run has a reference, by verl's rule (verl.trainer.ppo.utils.need_reference_policy)."""
    return bool(get("algorithm.use_kl_in_reward") or get("actor_rollout_ref.actor.use_kl_loss"))
