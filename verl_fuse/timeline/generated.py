"""Counts the tokens that engines generated in a step. Pure: a timeline in, numbers out.

A response of several turns also has tokens of tools and users, which no engine generates.

Invariants (tests/unit/timeline/test_generated.py):
- only requests of the step's generation count: validation comes later;
- tokens of a part that did not go on elsewhere are no part of a response;
- a response of one turn is generated whole: its share is exactly 1.
"""

from collections import Counter

from verl_fuse.spec.timeline import ABORTED, GENERATION, REQUEST, STEP, Timeline


def generated_tokens(timeline: Timeline) -> Counter[str]:
    """Return the generated tokens by prompt uid, "" for requests that do not know their prompt."""
    end = max((span.end for span in timeline.on(STEP) if span.name == GENERATION), default=timeline.start)
    found: Counter[str] = Counter()
    for span in timeline.spans:
        lost = "unmovable" in span.args and span.args.get("stop_reason") in ABORTED
        if span.name == REQUEST and span.start < end and not lost:
            found[str(span.args.get("prompt", ""))] += int(span.args.get("response_tokens", 0))
    return found


def generated_share(generated: int, responses: int) -> float | None:
    """Return the share of `responses` tokens of trajectories that engines `generated`; None where there are none."""
    return min(1.0, generated / responses) if generated and responses else None
