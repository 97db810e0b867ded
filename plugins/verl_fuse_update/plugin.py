"""Hooks of the plugin `update`."""

import logging
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.spec.composed import ACTOR, MODEL, Get, getter, has_critic, on_accelerators, sequence_ranks
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import LaneView, RolloutView
from verl_fuse_update import parts
from verl_fuse_update.config import UpdateConfig
from verl_fuse_update.contracts import contracts
from verl_fuse_update.features import FEATURES
from verl_fuse_update.lean.options import LeanOptions
from verl_fuse_update.memory import does_not_fit, logits_cost, stream_cost
from verl_fuse_update.refusals import (
    CRITIC_VALUES,
    OWN,
    RESPONSES,
    SHARE,
    SKIP,
    STREAM,
    Model,
    critic_apart,
    critic_shares,
    is_row_loss,
    is_token_mean,
    placed_models,
    refusals,
    switched_on,
)
from verl_fuse_update.streaming import CallSize, call_size, next_groups

logger = logging.getLogger(__name__)
PARTS = ("prompt", "response")
MICRO_BATCH = f"{ACTOR}.ppo_max_token_len_per_gpu"


class UpdatePlugin(Configured):
    """Puts code in place that leaves work out of an update."""

    HOOK_API = 2
    block, features, refused = UpdateConfig, FEATURES, staticmethod(refusals)

    def __init__(self) -> None:
        # This is the size of one streamed call; None where nothing is streamed.
        self._most: CallSize | None = None

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return contracts(None if config is None else getter(config))

    @hookimpl(wrapper=True)
    def fuse_worker_class(
        self, model: str, base: type, config: Mapping[str, Any]
    ) -> Generator[None, type | None, type | None]:
        # The class goes on top of the class that another plugin makes of verl's: the training itself is the other
        # plugin's concern.
        found = yield
        get = getter(config)
        # A preset does not end a run for a model that verl trains.
        strict = get("fuse.preset") in (None, "observe")
        if model == "critic" and critic_shares(get):
            from verl_fuse.host.sharing.engine import shared_prompts_critic_class

            found = shared_prompts_critic_class(found or base)
        if model == "critic" and get(CRITIC_VALUES):
            from verl_fuse_update.critic.worker import own_values_worker_class

            return own_values_worker_class(found or base)
        if model == "actor" and switched_on(get):
            found = _lean_worker_class(get, found or base)
        if model == "actor" and get(RESPONSES):
            from verl_fuse.host.inference.response_logits import response_logits_worker_class

            found = response_logits_worker_class(found or base, strict)
        if model == "actor" and get(SHARE):
            from verl_fuse.host.sharing.engine import shared_prompts_worker_class

            found = shared_prompts_worker_class(found or base, strict)
        return found

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: UpdateConfig = trainer.block("update")
        get, metrics = getter(trainer.config), block.metrics or "stock"
        shared = _sharing(trainer) if block.share_prompts else []
        if block.skip_values:
            trainer.add_part(parts.own_values)
        if block.stream:
            self._require_memory(trainer)
            self._most = call_size(get, trainer.devices_each)
            options = LeanOptions(bool(block.skip_zero_gradient), True, metrics)
            trainer.add_part(partial(parts.streamed, options=options, deferred=is_token_mean(get)))
        elif block.skip_zero_gradient or block.skip_old_log_prob:
            options = LeanOptions(
                bool(block.skip_zero_gradient),
                bool(block.skip_old_log_prob),
                metrics,
                bypass=bool(get("algorithm.rollout_correction.bypass_mode")),
                short_pass=metrics == "computed" and is_row_loss(get),
            )
            trainer.add_part(partial(parts.lean, options=options, balance=bool(block.balance), share="actor" in shared))
            if block.skip_old_log_prob:
                self._tell_memory(trainer)
        placed = placed_models(get) if block.balance or shared else []
        if block.balance:
            alone: list[Model] = [model for model in placed if model not in shared]
            trainer.add_part(partial(parts.balanced, models=alone))
        if shared:
            places: list[Model] = [model for model in placed if model in shared]
            trainer.add_part(partial(parts.shared, models=shared, places=places, balance=bool(block.balance)))

    def _require_memory(self, trainer: Trainer) -> None:
        get, ranks = getter(trainer.config), trainer.training_memory()["actor"]
        on_slices = bool(get("fuse.interstage.enabled")) and get("fuse.interstage.layout") == "slices"
        copies = len(trainer.streamed_stages) if on_slices else 0
        if reason := does_not_fit(ranks, trainer.devices_each, copies):
            raise FuseError(reason)
        logger.info(stream_cost(ranks, trainer.devices_each, copies))

    def _tell_memory(self, trainer: Trainer) -> None:
        get = getter(trainer.config)
        if (tokens := logits_tokens(get)) is not None:
            said, small = logits_cost(trainer.training_memory()["actor"], tokens)
            if small:
                size = MICRO_BATCH if get(f"{ACTOR}.use_dynamic_bsz") else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
                logger.warning("%s: a smaller %s, or %s=true, makes them fewer", said, size, RESPONSES)
            elif said:
                logger.info(said)

    @hookimpl
    def fuse_train_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        return None if self._most is None else next_groups(view, lane, self._most)


def logits_tokens(get: Get) -> int | None:
    """Return the most tokens of a micro-batch of the actor's update that have logits on an FSDP rank's accelerator;
    None where the run does not say, and where only some tokens have them, or none at a time."""
    if not on_accelerators(get) or get(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        return None
    if get(RESPONSES) or get(f"{MODEL}.use_fused_kernels"):
        return None
    if get(f"{ACTOR}.use_dynamic_bsz"):
        return get(MICRO_BATCH)
    rows, longest = get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"), [get(f"data.max_{part}_length") for part in PARTS]
    return rows * sum(longest) // (sequence_ranks(get, ACTOR) or 1) if rows and all(longest) else None


def _sharing(trainer: Trainer) -> list[Model]:
    """Return the models whose workers compute each prompt once: a critic that cannot is left as it is, and with a
    preset an actor, too."""
    get, asked = getter(trainer.config), list[Model](["actor"])
    if critic_shares(get):
        asked.append("critic")
    shared: list[Model] = [model for model in asked if trainer.shares_prompts(model)]
    if has_critic(get) and "critic" not in shared:
        why = critic_apart(get) or "its model cannot"
        logger.info("%s=true: the critic computes the prompt of each sample: %s", SHARE, why)
    return shared


def _lean_worker_class(get: Get, base: type) -> type:
    from verl_fuse_update.lean.worker import lean_worker_class

    options = LeanOptions(bool(get(SKIP)), bool(get(OWN)))
    if not get(STREAM):
        return lean_worker_class(base, options)
    from verl_fuse_update.stream.worker import stream_worker_class

    return stream_worker_class(base, options)
