"""Count how often prompts were prefilled, by the engine's own count of cached tokens. Pure: a timeline in, numbers
out."""

from collections import defaultdict

from verl_fuse.spec.timeline import REQUEST, WARM_REQUEST, Timeline


def prefill_metrics(timeline: Timeline) -> dict[str, float]:
    """Return the prompt tokens computed in the step's first turns, and how often a token of the prompts was computed;
    empty where the engine does not say.

    A prompt's tokens are counted once however many samples it has. `fuse/reprefilled_tokens` counts the parts that go
    on at another replica instead. Later turns are counted nowhere: their prompts differ from sample to sample.
    """
    # Prompt tokens, cached tokens, and whether the request only warms the prefix: of each request of a prompt.
    prompts: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
    for span in timeline.spans:
        args = span.args
        if span.name in (REQUEST, WARM_REQUEST) and "cached_tokens" in args and "resumed_tokens" not in args:
            found = int(args["prompt_tokens"]), int(args["cached_tokens"]), span.name == WARM_REQUEST
            prompts[str(args.get("prompt", ""))].append(found)
    prompts.pop("", None)
    if not prompts:
        return {}
    unique = computed = warmed = 0
    for requests in prompts.values():
        first = min(requests)[0]
        unique += first
        for tokens, cached, warms in requests:
            if tokens == first:
                computed += first - cached
                warmed += warms
    return {
        "fuse/prefilled_prompt_tokens": float(computed),
        "fuse/prefills_per_prompt_token": computed / unique,
        "fuse/warmed_prefixes": float(warmed),
    }
