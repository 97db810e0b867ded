"""Refuse configurations in which prompts may not be routed, or replicas not scaled, before anything is started."""

from collections.abc import Iterator

from verl_fuse.spec.composed import MODEL, ROLLOUT, Get, needed_beside, of_mode_fuse, on_accelerators
from verl_fuse.spec.step import Refusal

_BLOCK, _ON, _STANDALONE = "fuse.elastic", "fuse.elastic.enabled=true", "fuse.elastic.standalone"
# Keys, and the value that they need where prompts are routed, with the words about it.
_ROUTED = {
    f"{ROLLOUT}.name": ("vllm", "vllm: routing has not been run with another engine"),
    f"{ROLLOUT}.full_determinism": (False, "false: both decide where a request runs"),
    f"{ROLLOUT}.router_config_path": (None, "null: both decide where a request runs"),
}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.elastic` as set."""
    if get("fuse.elastic.enabled"):
        yield from of_mode_fuse(get, _ON)
        yield from needed_beside(get, _ON, _ROUTED)
        yield from _scaling(get)
        if get("fuse.elastic.standalone"):
            yield from _standalone(get)


def _scaling(get: Get) -> Iterator[Refusal]:
    least, most = get(f"{_BLOCK}.min_replicas"), get(f"{_BLOCK}.max_replicas")
    if least is not None and most is not None and least > most:
        yield Refusal(f"{_BLOCK}.min_replicas", least, f"at most {_BLOCK}.max_replicas, which is {most}")
    cut = get(f"{_BLOCK}.cut_fraction")
    if cut is not None and cut < 1 and not get(f"{_BLOCK}.release"):
        allowed = f"needs {_BLOCK}.release=true: a replica that is not released keeps its requests"
        yield Refusal(f"{_BLOCK}.cut_fraction", cut, allowed)
    key = f"{ROLLOUT}.free_cache_engine"
    if get(f"{_BLOCK}.release") and get(key) is False and on_accelerators(get):
        allowed = f"{_BLOCK}.release=true needs true: a replica that keeps its memory gives no device back"
        yield Refusal(key, False, allowed)
    if get(f"{_BLOCK}.release") and cut is not None and cut < 1:
        finishes = (False, "false: a prefill server alone cannot finish a request")
        yield from needed_beside(get, f"{_BLOCK}.cut_fraction={cut:g}", {f"{ROLLOUT}.disaggregation.enabled": finishes})
    threshold = get("fuse.interstage.enabled") and get("fuse.interstage.migration_threshold")
    for key in ("scale", "release"):
        if get(f"{_BLOCK}.{key}") and threshold:
            allowed = f"needs {_BLOCK}.{key}=false: both decide which replicas generate"
            yield Refusal("fuse.interstage.migration_threshold", threshold, allowed)


def _standalone(get: Get) -> Iterator[Refusal]:
    ranks = [key for key in (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank") if get(key)]
    if ranks and not get(f"{MODEL}.lora.merge"):
        allowed = f"{_STANDALONE} needs {MODEL}.lora.merge=true: an adapter alone is not sent"
        yield Refusal(ranks[0], get(ranks[0]), allowed)
    of_two_kinds = (False, "false: such a replica has servers of two kinds")
    yield from needed_beside(get, _STANDALONE, {f"{ROLLOUT}.disaggregation.enabled": of_two_kinds})
