"""Account for the work of the replicas' devices during generation, and for its cost. Pure: a timeline in, numbers out.

Invariants (tests/unit/elastic/test_ledger.py):
- busy, idle and parked add up to all replicas for as long as generation took;
- a replica is parked from its stop until generation ends;
- where no token was trained there is no cost per token.
"""

from dataclasses import dataclass

from verl_fuse.spec.timeline import GENERATION, MIGRATE, REPLICA, START, STEP, Timeline, union_seconds
from verl_fuse.timeline.tracks import role, spans_of


@dataclass(frozen=True, slots=True)
class Ledger:
    """The replica-seconds of one step's generation, which took `seconds`; `used` replicas generated."""

    seconds: float
    used: int
    busy: float
    idle: float
    parked: float

    @property
    def held(self) -> float:
        return self.busy + self.idle


def starting(timeline: Timeline) -> list[float]:
    """Return, for each replica that was taken in, the seconds for which the replica held its devices before that."""
    return [span.seconds for span in spans_of(timeline, REPLICA) if span.name == START]


def cost_metrics(
    timeline: Timeline, spent: Ledger, replicas: int, devices: int, price: float, tokens: int
) -> dict[str, float]:
    """Return the cost of a step that trained `tokens` tokens of responses, on `replicas` with `devices` each; a
    device-second costs `price`."""
    created = sum(starting(timeline))
    paid = devices * (replicas * (timeline.end - timeline.start) - spent.parked + created)
    return {
        "fuse/elastic_replicas": float(spent.used),
        "fuse/device_seconds_busy": devices * spent.busy,
        "fuse/device_seconds_idle": devices * spent.idle,
        "fuse/device_seconds_parked": devices * spent.parked,
        "fuse/device_seconds_starting": devices * created,
        **({"fuse/cost_per_million_tokens": 1e6 * price * paid / tokens} if tokens else {}),
    }


def ledger(timeline: Timeline, replicas: int) -> Ledger | None:
    """Return the account of `replicas` replicas; None where nothing was generated."""
    generation = [span for span in timeline.on(STEP) if span.name == GENERATION]
    if not generation:
        return None
    begin, end = generation[0].start, generation[0].end
    busy = parked = 0.0
    used = 0
    for track in (track for track in timeline.tracks if role(track) == REPLICA):
        spans = list(timeline.on(track))
        stopped = min((span.end for span in spans if span.name == MIGRATE and span.end <= end), default=end)
        parked += end - max(stopped, begin)
        work = [(max(s.start, begin), min(s.end, stopped)) for s in spans if s.category == "generate"]
        seconds = union_seconds([(a, b) for a, b in work if b > a])
        busy += seconds
        used += seconds > 0
    return Ledger(end - begin, used, busy, max(0.0, replicas * (end - begin) - busy - parked), parked)
