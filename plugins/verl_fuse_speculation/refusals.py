"""Refuse configurations in which drafts would change the samples, or in which speculation was not shown to be right,
before anything is started."""

from collections.abc import Iterator, Mapping

from verl_fuse.spec.composed import MODEL, ROLLOUT, Get, required, required_if_set
from verl_fuse.spec.step import Refusal

_ON = "fuse.speculation.enabled=true"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.speculation` as set."""
    if not get("fuse.speculation.enabled"):
        return
    yield from required(
        get,
        {
            "trainer.v1.trainer_mode": ("fuse", f"{_ON} needs trainer.v1.trainer_mode=fuse"),
            f"{ROLLOUT}.name": ("vllm", f"{_ON} needs vllm: no other engine drafts from history"),
        },
    )
    seeded = "with a seed, the samples would depend on the drafts"
    unaligned = "rows of rejected drafts were not shown to be left out of the routes"
    needs = {
        f"{ENGINE}.speculative_config": (None, f"not with {_ON}, which sets it"),
        f"{ENGINE}.scheduler_cls": (None, f"not with {_ON}, which sets it"),
        f"{ENGINE}.return_sampling_mask": (False, f"{_ON} needs false: masks of several tokens were not told apart"),
        f"{ENGINE}.logits_processors": (None, f"not with {_ON}: vLLM applies them to no drafted token"),
        f"{ENGINE}.async_scheduling": (False, f"{_ON} needs false: vLLM drafts on the host only between passes"),
        f"{ENGINE}.pipeline_parallel_size": (1, f"{_ON} needs 1: stages that wait for drafts were not run"),
        f"{ROLLOUT}.pipeline_model_parallel_size": (1, f"{_ON} needs 1: stages that wait for drafts were not run"),
        f"{ROLLOUT}.repetition_penalty": (
            1.0,
            f"{_ON} needs 1.0: penalties of drafted tokens were not shown to be right",
        ),
        f"{ROLLOUT}.full_determinism": (False, f"{_ON} needs false: {seeded}"),
        f"{ROLLOUT}.enable_rollout_routing_replay": (False, f"{_ON} needs false: {unaligned}"),
        f"{MODEL}.mtp.enable_rollout": (False, f"{_ON} needs false: an engine has one drafter"),
        f"{ROLLOUT}.disaggregation.enabled": (False, f"{_ON} needs false: a prefill server drafts nothing"),
    }
    yield from required_if_set(get, needs)
    additional = get(f"{ENGINE}.additional_config")
    if additional is not None and not isinstance(additional, Mapping):
        allowed = f"{_ON} needs a block of keys, not text: it adds keys to it"
        yield Refusal(f"{ENGINE}.additional_config", additional, allowed)
    if get(f"{ROLLOUT}.checkpoint_engine.backend") == "delta_sharded":
        allowed = f"not delta_sharded with {_ON}: verl sends no differences of weights to an engine that speculates"
        yield Refusal(f"{ROLLOUT}.checkpoint_engine.backend", "delta_sharded", allowed)
