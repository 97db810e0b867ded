"""Finds where each moved request came from.

Invariants (tests/unit/timeline/test_moves.py):
- a part is followed by one rest at most, on another replica, which begins no earlier than the part ends and goes on
  with its tokens;
- a rest of which no part is known is in no pair.
"""

from collections import defaultdict

from verl_fuse.spec.timeline import ABORTED, REPLICA, Span, Timeline
from verl_fuse.timeline.tracks import spans_of

# Clocks of two replicas' clients may differ by so many seconds.
_CLOCKS = 0.005


def moves(timeline: Timeline) -> list[tuple[Span, Span]]:
    """Return (part, rest) of every request that went on at another replica, by the start of the rest."""
    left: dict[tuple[object, int], list[Span]] = defaultdict(list)
    rests = []
    for span in sorted(spans_of(timeline, REPLICA), key=lambda span: span.start):
        if "resumed_tokens" in span.args:
            rests.append(span)
        if span.args.get("stop_reason") in ABORTED:
            reached = int(span.args.get("prompt_tokens", 0)) + int(span.args.get("response_tokens", 0))
            left[_request(span), reached].append(span)
    found = []
    for rest in rests:
        parts = left[_request(rest), int(rest.args.get("prompt_tokens", 0))]
        fitting = [part for part in parts if part.track != rest.track and part.end <= rest.start + _CLOCKS]
        if fitting:
            part = max(fitting, key=lambda part: part.end)
            parts.remove(part)
            found.append((part, rest))
    return found


def _request(span: Span) -> object:
    """Return what both parts of a request have in common: its prompt, or its name where no prompt was recorded."""
    return span.args.get("prompt", span.args.get("group", span.name))
