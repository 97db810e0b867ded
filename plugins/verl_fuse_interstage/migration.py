"""Decide when the long tail moves together, and onto which replicas (RLHFuse, section on inter-stage fusion).

Invariants (tests/unit/interstage/test_migration.py):
- nothing moves before at most R_t samples are unfinished, with R_t = 0, or twice in a step;
- the survivors have room for every unfinished sample, by its predicted length, and they are the replicas with the
  most work left;
- a replica with requests that cannot move is a survivor; once no request is left, the replica is freed as well;
- at least one replica is freed, or nothing moves; the reason why a tail that is due stays is logged once a step.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verl_fuse.spec.step import Migration, ReplicaView, RolloutView

logger = logging.getLogger(__name__)

CAUSE = "fuse.interstage.migration_threshold"


@dataclass(frozen=True, slots=True)
class Trigger:
    """The condition of a migration: at most `threshold` samples are unfinished (R_t); the tail moves to at least
    `survivors` replicas."""

    threshold: int
    survivors: int = 1


def configured(wanted: int | float | None, expected: int) -> Trigger:
    """Return the trigger of a configured threshold: a whole number is a number of samples, a fraction is a share of the
    step's `expected` samples."""
    return Trigger(wanted if isinstance(wanted, int) else int((wanted or 0) * expected))


def tail_migration(trigger: Trigger, view: RolloutView) -> Migration | None:
    """Return the survivors, once the tail is short enough; None before."""
    if not is_due(trigger, view):
        return None
    routed = [replica for replica in view.replicas if replica.routed]
    kept = survivors(routed, view.unfinished, trigger.survivors)
    freed = [replica for replica in routed if replica.rank not in kept]
    if len(routed) < len(view.replicas):
        # This is the rest of a tail that could not move at once: a replica that runs out of requests is freed.
        freed = [] if any(replica.running for replica in freed) or not _unmovable(routed) else freed
    return Migration(kept, CAUSE) if freed else None


def is_due(trigger: Trigger, view: RolloutView) -> bool:
    """Tell whether the tail is short enough to move, if a move is possible."""
    return 0 < view.unfinished <= trigger.threshold


def hindrance(trigger: Trigger, view: RolloutView) -> Literal["room", "unmovable"] | None:
    """Return why a tail that is due stays: fewer replicas have no room for the tail, or all run requests that cannot
    move."""
    replicas = view.replicas
    fewest = max(1, trigger.survivors)
    if not is_due(trigger, view) or len(replicas) <= fewest or not all(replica.routed for replica in replicas):
        return None
    if len(survivors(replicas, view.unfinished, fewest)) < len(replicas):
        return None
    return "unmovable" if _unmovable(replicas) else "room"


class Hindrances:
    """The reasons that keep the tail of one step from moving; `found` are the reasons seen so far."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def look(self, trigger: Trigger, view: RolloutView) -> None:
        """Log the reason that hinders the tail at this poll, unless that reason has been logged."""
        found = hindrance(trigger, view)
        if found is None or found in self.found:
            return
        self.found.add(found)
        about = {
            "room": [f"replica {seen.rank} has room for {seen.slots}" for seen in view.replicas],
            "unmovable": [f"replica {seen.rank} runs {seen.unmovable} that cannot move" for seen in view.replicas],
        }
        logger.info(
            "step %d: the last %d samples stay where they are, though %s asks for fewer replicas: %s",
            view.step, view.unfinished, CAUSE, ", ".join(about[found]),
        )  # fmt: skip


def survivors(replicas: Sequence[ReplicaView], unfinished: int, least: int = 1) -> tuple[int, ...]:
    """Return the ranks of the fewest replicas, `least` at least, with room for `unfinished` samples: all replicas with
    requests that cannot move, then the replicas with the most work left, whose requests need not move. Samples between
    two turns are work, too."""
    kept: list[int] = []
    room = 0
    for replica in sorted(replicas, key=lambda replica: (not replica.unmovable, -_work(replica), replica.rank)):
        if len(kept) >= least and room >= unfinished and not replica.unmovable:
            break
        kept.append(replica.rank)
        room += replica.slots
    return tuple(sorted(kept))


def _work(replica: ReplicaView) -> int:
    """Return the larger of two numbers: samples that are left, if `fuse_assign` gave any, and running requests, which
    are fewer between turns, and more where other requests moved there."""
    return max(replica.running, replica.unfinished)


def _unmovable(replicas: Sequence[ReplicaView]) -> int:
    return sum(replica.unmovable for replica in replicas)
