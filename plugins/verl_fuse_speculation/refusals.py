"""Refuse configurations in which drafts would change the samples, or in which speculation was not shown to be right,
before anything is started."""

from collections.abc import Iterator, Mapping

from verl_fuse.spec.composed import MODEL, ROLLOUT, Get, needed_beside, of_mode_fuse, required, required_if_set
from verl_fuse.spec.step import Refusal

_ON = "fuse.speculation.enabled=true"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
_STAGES = (1, "1: stages that wait for drafts were not run")
# Keys, and the value that they need beside drafts, with the words about it.
_NEEDS = {
    f"{ENGINE}.return_sampling_mask": (False, "false: masks of several tokens were not told apart"),
    f"{ENGINE}.async_scheduling": (False, "false: vLLM drafts on the host only between passes"),
    f"{ENGINE}.pipeline_parallel_size": _STAGES,
    f"{ROLLOUT}.pipeline_model_parallel_size": _STAGES,
    f"{ROLLOUT}.repetition_penalty": (1.0, "1.0: penalties of drafted tokens were not shown to be right"),
    f"{ROLLOUT}.full_determinism": (False, "false: with a seed, the samples would depend on the drafts"),
    f"{ROLLOUT}.enable_rollout_routing_replay": (
        False,
        "false: rows of rejected drafts were not shown to be left out of the routes",
    ),
    f"{MODEL}.mtp.enable_rollout": (False, "false: an engine has one drafter"),
    f"{ROLLOUT}.disaggregation.enabled": (False, "false: a prefill server drafts nothing"),
}
_OTHERS = {
    f"{ENGINE}.speculative_config": (None, f"not with {_ON}, which sets it"),
    f"{ENGINE}.scheduler_cls": (None, f"not with {_ON}, which sets it"),
    f"{ENGINE}.logits_processors": (None, f"not with {_ON}: vLLM applies them to no drafted token"),
}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.speculation` as set."""
    if not get("fuse.speculation.enabled"):
        return
    yield from of_mode_fuse(get, _ON)
    yield from required(get, {f"{ROLLOUT}.name": ("vllm", f"{_ON} needs vllm: no other engine drafts from history")})
    yield from required_if_set(get, _OTHERS)
    yield from needed_beside(get, _ON, _NEEDS)
    additional = get(f"{ENGINE}.additional_config")
    if additional is not None and not isinstance(additional, Mapping):
        allowed = f"{_ON} needs a block of keys, not text: it adds keys to it"
        yield Refusal(f"{ENGINE}.additional_config", additional, allowed)
    if get(f"{ROLLOUT}.checkpoint_engine.backend") == "delta_sharded":
        allowed = f"not delta_sharded with {_ON}: verl sends no differences of weights to an engine that speculates"
        yield Refusal(f"{ROLLOUT}.checkpoint_engine.backend", "delta_sharded", allowed)
