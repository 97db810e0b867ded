"""Count the fate of a step's requests when replicas were freed. Pure: a timeline in, numbers out."""

from verl_fuse.spec.timeline import REQUEST, Timeline


def request_metrics(timeline: Timeline) -> dict[str, float]:
    """Return the requests that moved, the tokens that were computed anew for the move, the requests that could not have
    moved, and how many of these started again."""
    requests = [span.args for span in timeline.spans if span.name == REQUEST]
    aborted = [args for args in requests if args.get("stop_reason") == "aborted"]
    ended = [args for args in aborted if "unmovable" in args]
    resumed = [args for args in requests if "resumed_tokens" in args]
    computed = sum(int(args["prompt_tokens"]) - int(args.get("cached_tokens", 0)) for args in resumed)
    return {
        "fuse/migrations": float(len(aborted) - len(ended)),
        "fuse/reprefilled_tokens": float(computed),
        "fuse/unmovable_requests": float(sum("unmovable" in args for args in requests) - len(ended)),
        "fuse/restarted_requests": float(sum(int(args["response_tokens"]) > 0 for args in ended)),
    }
