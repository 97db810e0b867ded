"""Count how often prompts were prefilled, by the engine's own count of cached tokens. Pure: a timeline in, numbers
out."""

from collections import defaultdict

from verl_fuse.spec.timeline import REQUEST, WARM_REQUEST, Span, Timeline


def prefill_metrics(timeline: Timeline) -> dict[str, float]:
    """Return the prompt tokens computed in the step's first turns, and how often a token of the prompts was computed;
    empty where the engine does not say.

    A prompt's tokens are counted once however many samples it has. `fuse/reprefilled_tokens` counts the parts that go
    on at another replica instead. Later turns are counted nowhere: their prompts differ from sample to sample.
    """
    prompts: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.name in (REQUEST, WARM_REQUEST) and "cached_tokens" in span.args and "resumed_tokens" not in span.args:
            prompts[str(span.args.get("prompt", ""))].append(span)
    prompts.pop("", None)
    if not prompts:
        return {}
    unique = computed = warmed = 0
    for spans in prompts.values():
        first = min(int(span.args["prompt_tokens"]) for span in spans)
        turns = [span for span in spans if int(span.args["prompt_tokens"]) == first]
        unique += first
        computed += sum(first - int(span.args["cached_tokens"]) for span in turns)
        warmed += sum(span.name == WARM_REQUEST for span in turns)
    return {
        "fuse/prefilled_prompt_tokens": float(computed),
        "fuse/prefills_per_prompt_token": computed / unique,
        "fuse/warmed_prefixes": float(warmed),
    }
