"""Choose the replicas that give their devices back while others still generate.

Invariants (tests/unit/elastic/test_release.py):
- at least one replica goes on;
- a replica that has samples left is given up only once `cut_fraction` of its own have finished, its requests can move,
  and the others have room, by predicted lengths, for its samples and theirs: also those between two turns, which have
  no request;
- at a cut fraction of 1 nothing moves: only replicas that are done are given up;
- before all samples are assigned nothing is given up;
- a step in which a replica is nearly done and the others have no room for its rest logs that once.
"""

import logging
from collections.abc import Sequence

from verl_fuse.spec.step import Migration, ReplicaView, RolloutView
from verl_fuse_elastic.config import ElasticConfig

logger = logging.getLogger(__name__)


class Release:
    """Decide poll by poll of one step, where the block asks for it; `without_room`: the rest of a replica had nowhere
    to go."""

    def __init__(self, block: ElasticConfig) -> None:
        self._on, self._cut_fraction = block.release, block.cut_fraction
        self.without_room = False

    def decide(self, view: RolloutView) -> Migration | None:
        """Return the replicas that go on, or None while all do."""
        migration = released(view, self._cut_fraction) if self._on else None
        if self._on and migration is None and not self.without_room and without_room(view, self._cut_fraction):
            self.without_room = True
            told = (
                f"replica {r.rank} has {r.unfinished} samples left and room for {r.slots}"
                for r in view.replicas
                if r.routed
            )
            logger.info(
                "step %d: a replica past fuse.elastic.cut_fraction keeps its requests: %s", view.step, ", ".join(told)
            )
        return migration


def released(view: RolloutView, cut_fraction: float) -> Migration | None:
    """Return the replicas that go on, or None while all do. The replicas that are done are given up, or else one that
    is nearly done."""
    routed = [replica for replica in view.replicas if replica.routed]
    if len(routed) < 2 or not _all_assigned(view):
        return None
    kept = [replica for replica in routed if replica.running or replica.unfinished]
    if len(kept) < len(routed):
        return Migration(tuple(replica.rank for replica in (kept or routed[:1])), "fuse.elastic.release")
    for replica in _nearly_done(routed, cut_fraction):
        others = [other for other in routed if other is not replica]
        if _has_room(others, view):
            return Migration(tuple(other.rank for other in others), "fuse.elastic.cut_fraction")
    return None


def without_room(view: RolloutView, cut_fraction: float) -> bool:
    """Tell whether a replica that is nearly done keeps its requests because the others have no room for them."""
    routed = [replica for replica in view.replicas if replica.routed]
    nearly = _nearly_done(routed, cut_fraction) if len(routed) > 1 and _all_assigned(view) else []
    return any(not _has_room([other for other in routed if other is not replica], view) for replica in nearly)


def _all_assigned(view: RolloutView) -> bool:
    return sum(replica.assigned for replica in view.replicas) >= view.expected


def _has_room(kept: Sequence[ReplicaView], view: RolloutView) -> bool:
    """Tell whether the `kept` replicas hold their own unfinished samples and those of all others, wherever these run
    now."""
    moved = sum(replica.unfinished for replica in view.replicas if replica not in kept)
    return sum(max(0, replica.slots - replica.unfinished) for replica in kept) >= moved


def _nearly_done(replicas: Sequence[ReplicaView], cut_fraction: float) -> list[ReplicaView]:
    """Return the replicas whose rest is to move, the replica with least to move first."""
    if cut_fraction >= 1:
        return []
    found = [
        replica
        for replica in replicas
        if replica.unfinished
        and not replica.unmovable
        and replica.assigned - replica.unfinished >= cut_fraction * replica.assigned
    ]
    return sorted(found, key=lambda replica: (replica.running, replica.rank))
