"""The records of this plugin's features, and their savings on a recorded run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from verl_fuse.feature import Feature, Fits, PresetName
from verl_fuse.simulate.saving import Saving
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    MODEL,
    ROLLOUT,
    Get,
    has_critic,
    has_few_zeros,
    has_reference,
    no_critic,
    training_devices,
)
from verl_fuse.spec.micro_batches import MICRO_BATCHES, MicroBatchKeys
from verl_fuse.spec.timeline import (
    DEFER_CRITIC,
    FUSED_UPDATE,
    OLD_LOG_PROB,
    REF_LOG_PROB,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    VALUES,
)

if TYPE_CHECKING:
    from verl_fuse.simulate.recorded import Recording

# With a prompt limit below this part of the response limit there is little to share; no run was measured there.
SHORT = 8
_COMPUTED: Mapping[PresetName, Mapping[str, Any]] = {"safe": {}, "fast": {"update.metrics": "computed"}}


def _balanced_anyway(get: Get) -> str | None:
    if not get(f"{ACTOR}.use_dynamic_bsz") and not get(f"{MODEL}.use_remove_padding"):
        # Rows of the same length share a micro-batch, which saves padding on any number of ranks.
        return None
    if training_devices(get) == 1:
        return "there is one rank"
    blocks = [ACTOR, *([CRITIC] if has_critic(get) else [])]
    if get(f"{ACTOR}.use_dynamic_bsz") and all(_one_mini_batch(get, block) for block in blocks):
        return "verl balances the one mini-batch of a step over ranks itself"
    return None


def _one_mini_batch(get: Get, block: str) -> bool:
    return get(f"{block}.ppo_mini_batch_size") == get("data.train_batch_size")


def _short_prompts(get: Get) -> str | None:
    if (get(f"{ROLLOUT}.n") or 1) == 1:
        return "each prompt has one sample"
    passes = [OLD_LOG_PROB, UPDATE_ACTOR, *([REF_LOG_PROB] if has_reference(get) else [])]
    if not has_critic(get) and all(_single_rows(get, MICRO_BATCHES[stage]) for stage in passes):
        return "micro-batches have one row each"
    prompt, response = get("data.max_prompt_length") or 0, get("data.max_response_length") or 0
    if SHORT * prompt < response:
        return f"prompts have less than an {SHORT}th of the tokens of responses"
    return None


def _single_rows(get: Get, keys: MicroBatchKeys) -> bool:
    return not get(keys.by_tokens) and get(keys.rows) == 1


def _streamed_values(get: Get) -> str | None:
    return no_critic(get) or _streamed(get, CRITIC, "values")


def _streamed(get: Get, block: str, what: str) -> str | None:
    if get("fuse.interstage.enabled") and not _one_mini_batch(get, block):
        return (
            f"with fuse.interstage {what} are computed while other samples generate, and the update replaces that pass "
            "only with one mini-batch a step; without fuse.interstage it saves the first mini-batch's part"
        )
    return None


def _zero_gradient(run: "Recording") -> Saving:
    if any(step.skipped for step in run.steps):
        return Saving("it was on: samples without a gradient were left out", on=True)
    if any(step.zero_gradient is None for step in run.steps):
        return Saving("the run does not say how many samples have no gradient", known=False)
    shares = [step.zero_gradient or 0.0 for step in run.steps]
    saved = sum(share * step.total([UPDATE_ACTOR]) for share, step in zip(shares, run.steps, strict=True))
    note = f"{sum(shares) / len(shares):.0%} of the tokens had no gradient"
    return _of_stage(run, note, UPDATE_ACTOR, saved / len(run.steps))


def _of_stage(run: "Recording", note: str, stage: str, seconds: float) -> Saving:
    """Return a saving of a part of one stage."""
    whole = run.stages.get(stage, 0.0)
    return Saving(note, seconds, stages={stage: seconds / whole} if whole else {})


def _old_log_prob(run: "Recording") -> Saving:
    if any(step.own_log_probs for step in run.steps):
        return Saving("it was on: the update computed its own", on=True)
    return _of_first(run, "actor", OLD_LOG_PROB)


def _of_first(run: "Recording", model: Literal["actor", "critic"], stage: str) -> Saving:
    number = run.mini_batches.get(model, 1)
    what = "with one mini-batch a step the update" if number == 1 else f"the first of {number} mini-batches"
    return _of_stage(run, f"{what} computes the same", stage, run.stages.get(stage, 0.0) / number)


def _values(run: "Recording") -> Saving:
    if any(step.own_values for step in run.steps):
        return Saving("it was on: the critic's update computed its own", on=True)
    if run.stages.get(FUSED_UPDATE) or run.stages.get(DEFER_CRITIC):
        return Saving("not beside a fused update, or a critic with devices of its own")
    if not run.stages.get(UPDATE_CRITIC):
        return Saving("no critic was trained")
    return _of_first(run, "critic", VALUES)


def _shared_prompts(run: "Recording") -> Saving:
    """Seconds go with tokens; attention of a response to its prompt stays."""
    from verl_fuse.simulate.shared_prompts import FEATURE, saved_share

    if FEATURE in run.on:
        return Saving("it was on: prompts were computed once", on=True)
    # Each stage's mini-batches, in each of which a prompt is computed.
    cut = {OLD_LOG_PROB: 1, REF_LOG_PROB: 1, UPDATE_ACTOR: run.mini_batches.get("actor", 1)}
    if not (run.stages.get(FUSED_UPDATE) or run.stages.get(DEFER_CRITIC)):
        cut |= {VALUES: 1, UPDATE_CRITIC: run.mini_batches.get("critic", 1)}
    saved, seconds = [], 0.0
    for step in run.steps:
        if step.group is None:
            return Saving("the run does not say which samples are of one prompt", known=False)
        if len({*zip(step.group.tolist(), step.prompt.tolist(), strict=True)}) > len({*step.group.tolist()}):
            several = "samples have several turns: requests do not say which of their tokens are the prompt's"
            return Saving(several, known=False)
        shares = {number: saved_share(step.group, step.prompt, step.response, number) for number in cut.values()}
        saved.append(shares)
        seconds += sum(shares[number] * step.total([stage]) for stage, number in cut.items())
    share = {number: sum(each[number] for each in saved) / len(saved) for number in cut.values()}
    return Saving(
        f"{share[cut[UPDATE_ACTOR]]:.0%} of the tokens of the update, {share[1]:.0%} of a pass are such copies",
        seconds / len(run.steps),
        stages={stage: share[number] for stage, number in cut.items()},
    )


def _stream(run: "Recording") -> Saving:
    """Replicas that are done are released, and the update in copies takes as long as the recorded one."""
    from verl_fuse.simulate.streamed import NO_INFERENCE, StreamedUpdate, streamed_tail
    from verl_fuse.simulate.tail import unmigrated

    if any(step.streamed for step in run.steps):
        return Saving("it was on: groups were trained on while others generated", on=True)
    if any(step.total([UPDATE_CRITIC]) for step in run.steps):
        return Saving("an advantage needs the whole batch: nothing is streamed with a critic")
    if any(step.total([REF_LOG_PROB]) for step in run.steps):
        return Saving("a group is trained on after its reference log-probs: with interstage")
    if not run.dedicated:
        return Saving("devices are shared and saturated: a replica that is done leaves none free")
    saved, shares = [], []
    for step, rollout in zip(run.steps, run.through, strict=True):
        if step.group is None:
            return Saving("the run does not say which samples are of one prompt", known=False)
        seconds = step.total([UPDATE_ACTOR])
        work = step.replicas * seconds / int(rollout.requests.tokens.sum())
        tail = streamed_tail(unmigrated(rollout, NO_INFERENCE), step.group, StreamedUpdate(work))
        saved.append(rollout.seconds + seconds - tail.seconds)
        shares.append(tail.share)
    note = (
        f"{sum(shares) / len(shares):.0%} of the update before generation ends, if copies of the actor on each replica "
        "(fsdp_config.fsdp_size: its devices) train as fast"
    )
    found = _of_stage(run, note, UPDATE_ACTOR, max(0.0, sum(saved) / len(saved)))
    return replace(found, replayed=True)


def _of_the_waiting(stages: Mapping[str, float]) -> str:
    seconds = stages.get(UPDATE_ACTOR, 0.0) + stages.get(UPDATE_CRITIC, 0.0)
    return (
        f"ranks wait for each other in the {seconds:.2f} s of updates: simulated, 9 % of them with 4 mini-batches on 2 "
        "ranks, 12 to 26 % on 8 to 32; `verl-fuse ab` measures it"
    )


def _of_the_logits(stages: Mapping[str, float]) -> str:
    update = stages.get(UPDATE_ACTOR, 0.0)
    passes = sum(stages.get(stage, 0.0) for stage in (OLD_LOG_PROB, REF_LOG_PROB))
    return (
        f"on one H100 4 to 11 % of an update ({update:.2f} s here) and 4 to 16 % of a pass ({passes:.2f} s), and up to "
        "41 and 55 % of their peak memory; `verl-fuse ab` measures it"
    )


FEATURES = (
    Feature(
        "old_log_prob",
        {"update.skip_old_log_prob": True},
        presets=_COMPUTED,
        idle=lambda get: _streamed(get, ACTOR, "old log-probs"),
        measured=1.25,
        strategy="old_log_prob",
        saving=_old_log_prob,
        fits=Fits(
            "updates without waste",
            "GRPO, DAPO; PPO's critic; KL loss: old log-probs alone",
            "FSDP, FSDP2, Megatron",
            "any",
            "2 ranks",
        ),
    ),
    Feature(
        "zero_gradient",
        {"update.skip_zero_gradient": True},
        presets=_COMPUTED,
        idle=has_few_zeros,
        measured=1.23,
        strategy="zero_gradient",
        saving=_zero_gradient,
    ),
    Feature(
        "values",
        {"update.skip_values": True},
        presets={"safe": {}, "fast": {}},
        idle=_streamed_values,
        measured=1.07,
        strategy="values",
        saving=_values,
    ),
    Feature(
        "balance",
        {"update.balance": True},
        presets={"safe": {}, "fast": {}},
        idle=_balanced_anyway,
        most=_of_the_waiting,
        fits=Fits("balanced mini-batches", "any", "FSDP, FSDP2, Megatron", "any", "2 ranks"),
    ),
    Feature(
        "share_prompts",
        {"update.share_prompts": True},
        presets={"safe": {}, "fast": {}},
        idle=_short_prompts,
        # Prompts as long as responses.
        measured=1.18,
        strategy="share_prompts",
        saving=_shared_prompts,
        fits=Fits("prompts once, logits of responses", "any", "FSDP, FSDP2", "any", "2 ranks"),
    ),
    Feature(
        "response_logits",
        {"update.response_logits": True},
        presets={"safe": {}, "fast": {}},
        # The update.
        measured=1.11,
        strategy="response_logits",
        most=_of_the_logits,
    ),
    Feature(
        "stream",
        {
            "update.stream": True,
            "update.skip_old_log_prob": True,
            "elastic.enabled": True,
            "elastic.release": True,
        },
        measured=1.3,
        strategy="stream",
        beside="old_log_prob",
        saving=_stream,
    ),
)
