"""Hooks of the plugin `interstage`."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.spec.composed import ACTOR, CRITIC, getter, has_critic
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.events import Event, StepBegun
from verl_fuse.spec.step import LaneView, Migration, RequestView, RolloutView
from verl_fuse.spec.timeline import Timeline
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.connector import connector_params
from verl_fuse_interstage.contracts import CONTRACTS, MEGATRON_SLICE_CONTRACTS, SLICE_CONTRACTS
from verl_fuse_interstage.features import FEATURES
from verl_fuse_interstage.gains import in_force
from verl_fuse_interstage.measured import streaming_metrics
from verl_fuse_interstage.memory import memory_findings
from verl_fuse_interstage.migration import Hindrances, configured, tail_migration
from verl_fuse_interstage.policy import next_micro_group
from verl_fuse_interstage.refusals import refusals
from verl_fuse_interstage.requests import request_metrics

if TYPE_CHECKING:
    from verl_fuse_interstage.auto import Decisions

logger = logging.getLogger(__name__)

STREAMED_UPDATES, SHARED_PROMPTS = "fuse.update.stream", "fuse.update.share_prompts"


def slices(host: Any, groups: Mapping[str, Any], **settings: Any) -> Any:
    """Return the part that runs inference on slices. They need verl, and are imported when they are made."""
    from verl_fuse_interstage.slices.refresh import with_slices

    return with_slices(host, groups, **settings)


class InterstagePlugin(Configured):
    """Stream finished samples and move the tail, where `fuse.interstage` asks for that and something is gained."""

    HOOK_API = 2
    block, features, refused = InterstageConfig, FEATURES, staticmethod(refusals)

    def __init__(self) -> None:
        self._block = InterstageConfig()
        # True if finished samples go through inference.
        self._infers = False
        # True if a call computes the prompt of its samples once.
        self._by_prompt = False
        self._decisions: Decisions | None = None
        self._hindrances = Hindrances()

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        if config is None:
            return (*CONTRACTS, *SLICE_CONTRACTS, *MEGATRON_SLICE_CONTRACTS)
        get = getter(config)
        if get("fuse.interstage.layout") != "slices":
            return CONTRACTS
        of_engine = MEGATRON_SLICE_CONTRACTS if get(f"{ACTOR}.strategy") == "megatron" else SLICE_CONTRACTS
        return (*CONTRACTS, *of_engine)

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: InterstageConfig = trainer.block("interstage")
        streams, stages, left_out = False, (), None
        self._block = block
        if block.enabled:
            stages, streams = trainer.streamed_stages, bool(getter(trainer.config)(STREAMED_UPDATES))
            self._block, left_out = in_force(block, stages, streams)
        self._infers = bool(self._block.enabled and stages)
        if left_out:
            logger.warning(left_out)
        if self._infers:
            self._require_memory(trainer)
            self._by_prompt = bool(getter(trainer.config)(SHARED_PROMPTS)) and trainer.shares_prompts()
        if self._infers and self._block.layout == "slices":
            trainer.add_part(partial(slices, stages=stages, share_prompts=self._by_prompt))
        if self._block.enabled and self._block.migration_threshold == "auto":
            # Numba takes a second to import, and only this class needs Numba.
            from verl_fuse_interstage.auto import Decisions

            self._decisions = Decisions(
                trainer.replica_views(),
                trainer.devices_each,
                trainer.config.actor_rollout_ref.rollout,
                infers=self._infers,
                streams=streams,
            )

    def _require_memory(self, trainer: Trainer) -> None:
        get = getter(trainer.config)
        models = (ACTOR, CRITIC) if has_critic(get) else (ACTOR,)
        # Copies of Megatron's models are counted, a micro-batch beside vLLM is not.
        known = (None, "fsdp", "fsdp2", *(("megatron",) if self._block.layout == "slices" else ()))
        if any(get(f"{model}.strategy") not in known for model in models):
            return
        found = memory_findings(get, trainer.streamed_stages, trainer.devices_each, trainer.training_memory())
        for line in found.warned:
            logger.warning(line)
        if found.refused:
            raise FuseError(*found.refused)

    @hookimpl
    def fuse_infer_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        return next_micro_group(self._block, view, lane, self._by_prompt) if self._infers else None

    @hookimpl
    def fuse_migration(self, view: RolloutView) -> Migration | None:
        if not self._block.enabled:
            return None
        wanted = self._block.migration_threshold
        fixed = configured(None if wanted == "auto" else wanted, view.expected)
        trigger = fixed if self._decisions is None else self._decisions.trigger(view)
        self._hindrances.look(trigger, view)
        return tail_migration(trigger, view)

    @hookimpl
    def fuse_transfer(self, request: RequestView, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return connector_params(getter(config), request.weights)

    @hookimpl
    def fuse_event(self, event: Event) -> None:
        if isinstance(event, StepBegun):
            self._hindrances = Hindrances()
        if self._decisions is not None:
            self._decisions.observe(event)

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float]:
        return {
            **request_metrics(timeline),
            "fuse/tail_without_room": float("room" in self._hindrances.found),
            **({} if self._decisions is None else self._decisions.metrics(timeline)),
            **streaming_metrics(timeline),
        }
