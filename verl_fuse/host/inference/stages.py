"""Tells how verl's inference stages constrain a batch, and computes the metrics that verl derives from a batch.

A stage's batch must divide evenly over data-parallel ranks, and over micro-batches where their size is fixed
(workers/engine/utils.py `prepare_micro_batches`). verl decides which configuration keys count: see `engine_workers.py`
`init_model` and `trainer_base.py` `_setup`.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics

from verl_fuse.host.upstream.rows import read
from verl_fuse.spec.step import Stage

# What a forward pass reads of a sample; everything else stays in TransferQueue.
READ_FIELDS = ("input_ids", "position_ids", "loss_mask", "response_mask", "prompts", "responses")
STAGE_FIELDS: dict[Stage, tuple[str, ...]] = {
    "old_log_prob": ("old_log_probs", "entropy"),
    "ref": ("ref_log_prob",),
    "values": ("values",),
}


def streamed_stages(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> tuple[Stage, ...]:
    """Return the stages that a finished sample can go through before the batch is complete. Stages are left out: a
    bypassed old log-prob costs nothing, so verl keeps the stage; updates may compute old log-probs and values
    themselves; a critic with workers of its own computes its values there."""
    correction = config.algorithm.get("rollout_correction", None)
    bypass = bool(correction and correction.get("bypass_mode", False))
    wanted: tuple[tuple[Stage, bool], ...] = (
        ("old_log_prob", not bypass and not OmegaConf.select(config, "fuse.update.skip_old_log_prob")),
        ("ref", use_reference_policy),
        (
            "values",
            use_critic
            and not OmegaConf.select(config, "fuse.placement.critic")
            and not OmegaConf.select(config, "fuse.update.skip_values"),
        ),
    )
    return tuple(stage for stage, used in wanted if used)


def micro_batch(config: DictConfig, stage: Stage, ref_in_actor: bool) -> int:
    """Return the number of samples of which a rank's share of a batch must be a multiple: 1 with dynamic batch sizes.
    `ref_in_actor`: the actor is the reference (LoRA)."""
    if stage == "values":
        engine: Any = omega_conf_to_dataclass(config.critic).engine
        dynamic, size = engine.use_dynamic_bsz, engine.infer_micro_batch_size_per_gpu
    else:
        node = (
            config.actor_rollout_ref.rollout
            if stage == "old_log_prob" or ref_in_actor
            else config.actor_rollout_ref.ref
        )
        dynamic, size = node.get("log_prob_use_dynamic_bsz", False), node.get("log_prob_micro_batch_size_per_gpu", None)
    return 1 if dynamic or not size else int(size)


def old_log_prob_metrics(config: DictConfig, batch: KVBatchMeta) -> dict[str, float]:
    """Return entropy and rollout/trainer gap over the whole batch, equal to the metrics of verl's
    `_compute_old_log_prob` for a batch computed at once."""
    with_rollout = config.actor_rollout_ref.rollout.calculate_log_probs
    fields = [
        "entropy",
        "old_log_probs",
        "response_mask",
        *(["responses", "rollout_log_probs"] if with_rollout else []),
    ]
    stored = read(batch, fields)
    data = DataProto(batch=stored.to_padded_tensor())
    actor = config.actor_rollout_ref.actor
    entropy = agg_loss(
        loss_mat=data.batch["entropy"],
        loss_mask=data.batch["response_mask"],
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return {"actor/entropy": entropy.item(), **(calculate_debug_metrics(data) if with_rollout else {})}
