"""Finds LoRA configurations that verl cannot train, before a run starts instead of in its first step.

Invariant (tests/unit/host/test_adapters.py): a configuration refused here ends in stock verl 0.9.1 in an error, or in
values of another critic: the reference of a policy with adapters is the policy without them, and verl leaves the flag
for that, `no_lora_adapter`, in the batch that the critic gets next (`PPOTrainer._compute_ref_log_prob`,
`TrainingWorker.infer_batch`).
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_fuse.spec.composed import MODEL, getter, has_adapters, has_critic, has_reference
from verl_fuse.spec.step import Refusal


def adapter_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse a policy with adapters beside a reference and a critic."""
    get = getter(config)
    if not (has_adapters(get) and has_reference(get) and has_critic(get)):
        return
    ranks = (key for key in (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank") if get(key))
    key = next(ranks, f"{MODEL}.lora_adapter_path")
    critic = "its values would be those without its adapter"
    if not get("critic.model.lora_rank"):
        critic = "its model has none to leave out (AttributeError: disable_adapter)"
    yield Refusal(
        key,
        get(key),
        "not with a reference and a critic: verl 0.9.1 asks the critic for values without adapters after the "
        f"reference, and {critic}. Needs "
        "algorithm.use_kl_in_reward=false and actor_rollout_ref.actor.use_kl_loss=false, or critic.enable=false, or "
        "no LoRA",
    )
