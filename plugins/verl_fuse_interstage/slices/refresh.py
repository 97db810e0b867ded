"""Gives slices the weights of a step while the replicas get them.

No stage waits for weights: the lane of the training workers has nothing else to do while the next step generates, and
slices begin when replicas are released. Only an export that needs a device's memory is done while the replicas still
sleep. Slices give their devices' memory back as soon as they have computed the last sample of a step, before a model is
trained there and before the replicas wake.

The first export is of all parameters, every later export of the trained parameters: with LoRA, of adapters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.utils import Role

from verl_fuse.host import assembly
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.stages import micro_batch
from verl_fuse.host.record.step import TrainerPart
from verl_fuse.host.weights.exports import Export, joined
from verl_fuse.spec.step import Stage
from verl_fuse_interstage.slices.groups import Slices, SliceSetup


class SliceRefresh(TrainerPart):
    """`export` leaves the weights of the training workers, all or the trained ones, and runs on the workers' `lane`;
    `on_devices`: the export needs memory of their devices."""

    def __init__(self, slices: Slices, lane: Lane, export: Callable[[bool], Mapping[Stage, Export]], on_devices: bool):
        self._slices, self._lane, self._export, self._on_devices = slices, lane, export, on_devices
        self._whole, self._nbytes = True, 0

    def after_inference(self, step: int) -> None:
        self._slices.release_memory()
        self.metrics = {"fuse/slice_weight_bytes": float(self._nbytes)}

    def before_weight_sync(self, step: int) -> None:
        if self._on_devices:
            self._refresh()

    def after_weight_sync(self, step: int) -> None:
        if not self._on_devices:
            self._refresh()

    def _refresh(self) -> None:
        export = partial(self._lane.recorded, "export_weights", "sync", self._exported)
        self._slices.load(self._lane.submit(export, "export_weights"))

    def _exported(self) -> Mapping[Stage, Export]:
        found = self._export(self._whole)
        self._whole, self._nbytes = False, sum(export.nbytes for export in found.values())
        return found

    def close(self) -> None:
        self._slices.close()


def with_slices(host: Any, groups: Mapping[str, Any], *, stages: Sequence[Stage], share_prompts: bool) -> SliceRefresh:
    """Return the part with which inference of the trainer `host` runs on slices, one per rollout replica, as replicas
    are released. `stages` go through them; with `share_prompts` their ranks compute each prompt once."""
    built = _built(host, stages)
    host.inference.use_slices(built.lanes(assembly.extra_info(host)), share_prompts)
    return SliceRefresh(built, host.lane, partial(_exported, groups, stages), exports_on_devices(host.config))


def _built(host: Any, stages: Sequence[Stage]) -> Slices:
    setup = SliceSetup(
        config=host.config,
        critic=_critic_configuration(host) if "values" in stages else None,
        stages=tuple(stages),
        # Each model has micro-batches of its own, and one batch goes through all of them.
        micro_batch=math.lcm(*(micro_batch(host.config, stage, host.ref_in_actor) for stage in stages)),
        multimodal=host.processor is not None,
    )
    (role,) = [role for role in assembly.ACTOR_ROLES if role in host.role_worker_mapping]
    pool = host.resource_pool_manager.get_resource_pool(role)
    size = host.llm_server_manager.get_replicas()[0].world_size
    return Slices(setup, pool, size, host.journal.recorder, host.settings.core.call_timeout)


def _critic_configuration(host: Any) -> Any:
    """Return the configuration of the critic's workers, which verl puts together in `_setup` alone."""
    pool = host.resource_pool_manager.get_resource_pool(Role.Critic)
    return host.resource_pool_to_cls[pool][str(Role.Critic)].kwargs["config"]


def _exported(groups: Mapping[str, Any], stages: Sequence[Stage], whole: bool) -> dict[Stage, Export]:
    """Return the parameters that slices need for `stages`, left by the training workers: all of them (`whole`), or the
    trained ones."""
    models = {"old_log_prob": "actor", "values": "critic"}
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
