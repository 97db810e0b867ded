"""Puts the parts of a trainer together: worker classes, the critic's devices, replicas, and inference with the limits
of a batch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from verl.trainer.ppo.utils import Role

from verl_fuse.host.inference.samples import SampleInference, StageCall
from verl_fuse.host.inference.stages import STAGE_FIELDS, micro_batch, streamed_stages
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.host.upstream.parted_pool import PartedPools
from verl_fuse.host.worker import recording_worker_class
from verl_fuse.spec.step import Stage

# The RPC mesh each stage's batch is dispatched over (verl/workers/engine_workers.py).
_MESH: dict[Stage, str] = {"old_log_prob": "actor", "ref": "ref", "values": "train"}
ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


def worker_classes(trainer: Any) -> dict[Role, Any]:
    """Return the worker classes of the trained models by role: the classes that plugins choose, which record each
    rank's work."""
    found = {}
    for role, remote_class in trainer.role_worker_mapping.items():
        model = "actor" if role in ACTOR_ROLES else "critic" if role is Role.Critic else None
        if model is not None:
            stock, hook = remote_class.__ray_actor_class__, trainer.settings.manager.hook
            chosen = hook.fuse_worker_class(model=model, base=stock, config=trainer.config) or stock
            own = critic_devices(trainer) if model == "critic" else None
            found[role] = ray.remote(recording_worker_class(model, chosen, own.start if own else 0))
    return found


def critic_devices(trainer: Any) -> range | None:
    """Return the devices on which the critic has workers of its own; None: the critic is beside the actor, or there is
    none."""
    config, hook = trainer.config, trainer.settings.manager.hook
    return hook.fuse_devices(model="critic", config=config) if trainer.use_critic else None


def place_critic(trainer: Any) -> None:
    """Give the critic's role, where the critic has devices of its own, a part of the role's resource pool."""
    if (devices := critic_devices(trainer)) is not None:
        trainer.resource_pool_manager = PartedPools(trainer.resource_pool_manager, Role.Critic, devices)


def build_replicas(trainer: Any) -> Replicas:
    """Return the rollout replicas on the training devices."""
    rollout = trainer.config.actor_rollout_ref.rollout
    return Replicas(
        trainer.llm_server_manager,
        trainer.checkpoint_manager,
        trainer.journal.recorder,
        trainer.settings.core.replica_timeout,
        max_num_seqs=rollout.max_num_seqs,
        sequence_tokens=rollout.prompt_length + rollout.response_length,
    )


def stages_of(trainer: Any) -> tuple[Stage, ...]:
    """Return the stages that finished samples of this run go through."""
    return streamed_stages(trainer.config, trainer.use_reference_policy, trainer.use_critic)


def training_groups(trainer: Any) -> dict[str, Any]:
    """Return the worker groups of the models that are trained."""
    return {"actor": trainer.actor_rollout_wg} | ({"critic": trainer.critic_wg} if trainer.use_critic else {})


def extra_info(trainer: Any) -> Mapping[str, Any]:
    """Return values that a batch carries to the workers besides its rows."""
    return {"temperature": trainer.config.actor_rollout_ref.rollout.temperature}


def sample_inference(trainer: Any, stock: Any) -> SampleInference:
    """Return inference on the training workers' lane through the stage methods of `stock`, verl's trainer."""
    stages = stages_of(trainer)
    sizes = {stage: _data_parallel_size(trainer, stage) for stage in stages}
    calls: dict[Stage, StageCall] = {
        "old_log_prob": stock._compute_old_log_prob,
        "ref": stock._compute_ref_log_prob,
        "values": stock._compute_values,
    }
    return SampleInference(
        lane=trainer.lane,
        # Parts are added later.
        calls={stage: partial(trainer.call, stage, calls[stage]) for stage in stages},
        dp_size=max(sizes.values(), default=1),
        multiples={stage: sizes[stage] * micro_batch(trainer.config, stage, trainer.ref_in_actor) for stage in stages},
        fields=STAGE_FIELDS,
        extra_info=extra_info(trainer),
    )


def _data_parallel_size(trainer: Any, stage: Stage) -> int:
    if stage == "values":
        return data_parallel_size(trainer.critic_wg, _MESH[stage])
    if stage == "ref" and not trainer.ref_in_actor:
        return data_parallel_size(trainer.ref_policy_wg, _MESH[stage])
    return data_parallel_size(trainer.actor_rollout_wg, _MESH["old_log_prob"])
