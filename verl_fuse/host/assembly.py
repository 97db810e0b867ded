"""Puts inference together for a trainer: stage calls, the limits of a batch, and the slices beside the training
workers."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_fuse.host.inference.apart import InferenceApart
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import SampleInference, StageCall
from verl_fuse.host.inference.slices import READ_FIELDS, Slices, SliceSetup
from verl_fuse.host.inference.stages import STAGE_FIELDS, micro_batch, streamed_stages
from verl_fuse.host.record.step import RunStage
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.rollout.standalone.pool import StandalonePool
from verl_fuse.host.update.deferred import LEARNED_FIELDS, DeferredCritic
from verl_fuse.host.update.lean.options import LeanOptions
from verl_fuse.host.update.parted_pool import PartedPools
from verl_fuse.host.update.stream.driver import StreamedUpdates
from verl_fuse.host.update.stream.lanes import StreamLanes
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.host.weights.exports import Export, joined
from verl_fuse.host.worker import recording_worker_class
from verl_fuse.spec.step import Stage
from verl_fuse.spec.timeline import CRITIC_LANE

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


def deferred_critic(trainer: Any) -> DeferredCritic:
    """Return the part that trains the critic beside the stages that follow, on a lane of its own."""
    journal, fields = trainer.journal, [*READ_FIELDS, *LEARNED_FIELDS]
    if trainer.processor is not None:
        fields.append("multi_modal_inputs")
    lane = Lane(CRITIC_LANE, journal.recorder, trainer.settings.core.call_timeout)
    warm_up = trainer.config.trainer.critic_warmup
    return DeferredCritic(
        lane, journal, fields, lambda metrics, step: trainer.logger.log(data=metrics, step=step), warm_up
    )


def values_apart(trainer: Any, deferred: DeferredCritic) -> InferenceApart:
    """Return inference of values on the critic's own workers, open while they hold the weights of the last step."""
    devices, each = critic_devices(trainer), trainer.replicas.devices_each
    assert devices is not None, "a deferred critic has devices of its own"
    size = _data_parallel_size(trainer, "values")
    inference = SampleInference(
        lane=deferred.lane,
        calls={"values": partial(PPOTrainerSync._compute_values, trainer)},
        dp_size=size,
        multiples={"values": size * micro_batch(trainer.config, "values", trainer.ref_in_actor)},
        fields=STAGE_FIELDS,
        extra_info=extra_info(trainer),
        beside=bool(stages_of(trainer)),
    )
    return InferenceApart(inference, lambda: deferred.is_done, {device // each for device in devices})


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


def exported(trainer: Any, stages: Sequence[Stage], whole: bool) -> dict[Stage, Export]:
    """Return the parameters that slices need for `stages`, left by the training workers: all of them (`whole`), or the
    trained ones."""
    groups, models = training_groups(trainer), {"old_log_prob": "actor", "values": "critic"}
    return {stage: joined(groups[models[stage]].export_weights(whole)) for stage in stages if stage in models}


def exports_on_devices(config: Any) -> bool:
    """Tell whether a training rank loads its whole offloaded shard to its device before the rank leaves weights for
    slices: FSDP1 and Megatron do."""
    blocks = {"actor_rollout_ref.actor": "fsdp_config", "critic": "fsdp"}
    return any(
        bool(OmegaConf.select(config, f"{model}.{ {'fsdp': block, 'megatron': 'megatron'}[strategy] }.param_offload"))
        for model, block in blocks.items()
        if (strategy := OmegaConf.select(config, f"{model}.strategy")) in ("fsdp", "megatron")
    )


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


def exported_whole(actor: Any) -> list[Any]:
    """Return the parameters that the worker group `actor` leaves for standalone replicas, in its order; a collective of
    its workers."""
    turns = zip_longest(*actor.export_whole())
    return [bucket for turn in turns for bucket in turn if bucket is not None]


def build_standalone(trainer: Any, most: int, launch_timeout: float) -> StandalonePool:
    """Return a pool with room for `most` replicas like those on the training devices, with devices of their own."""
    manager, block = trainer.llm_server_manager, trainer.config.actor_rollout_ref
    rollout = deepcopy(block.rollout)
    # The engine is offered the replicas' weights from outside, like verl offers weights on the training devices.
    OmegaConf.update(rollout, "checkpoint_engine.backend", "naive")

    def build(rank: int) -> Any:
        return manager.rollout_replica_class(
            replica_rank=rank, config=rollout, model_config=block.model, gpus_per_node=rollout.n_gpus_per_node
        )

    core = trainer.settings.core
    return StandalonePool(
        build, most, trainer.replicas, trainer.journal.recorder, launch_timeout, core.weight_sync_timeout
    )


def streamed_updates(
    trainer: Any, run: RunStage, inference: SampleInference, options: LeanOptions, deferred: bool
) -> StreamedUpdates:
    """Return the updates of an actor whose shard groups are on the devices of one replica each; `run` runs a stage on
    all of them, `inference` may have slices on their devices."""
    each, workers = trainer.replicas.devices_each, trainer.actor_rollout_wg.world_size
    timeout, recorder = trainer.settings.core.call_timeout, trainer.journal.recorder

    def lane_of(number: int) -> Lane:
        return inference.lane_at(number) or Lane(f"update {number}", recorder, timeout)

    lanes, stock = StreamLanes(workers // each, lane_of), partial(PPOTrainerSync._compute_advantage, trainer)
    return StreamedUpdates(trainer, run, options, lanes, each, stock, deferred)


def _critic_configuration(trainer: Any) -> Any:
    """Return the configuration of the critic's workers, which verl puts together in `_setup` alone."""
    pool = trainer.resource_pool_manager.get_resource_pool(Role.Critic)
    return trainer.resource_pool_to_cls[pool][str(Role.Critic)].kwargs["config"]


def build_slices(trainer: Any) -> Slices:
    """Return a slice per rollout replica, on the replica's devices."""
    stages = stages_of(trainer)
    setup = SliceSetup(
        config=trainer.config,
        critic=_critic_configuration(trainer) if "values" in stages else None,
        stages=stages,
        # Each model has micro-batches of its own, and one batch goes through all of them.
        micro_batch=math.lcm(*(micro_batch(trainer.config, stage, trainer.ref_in_actor) for stage in stages)),
        multimodal=trainer.processor is not None,
    )
    (role,) = [role for role in ACTOR_ROLES if role in trainer.role_worker_mapping]
    pool = trainer.resource_pool_manager.get_resource_pool(role)
    size = trainer.llm_server_manager.get_replicas()[0].world_size
    return Slices(setup, pool, size, trainer.journal.recorder, trainer.settings.core.call_timeout)
