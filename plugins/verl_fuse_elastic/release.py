"""Which replicas can give their devices back while others still generate. Pure: a view in, a migration out.

Invariants (tests/unit/elastic/test_release.py):
- at least one replica goes on;
- a replica that has samples left is given up only once it has finished `cut_fraction` of its own, and the others have room for what it runs;
- at a cut fraction of 1 nothing moves: only replicas that are done are given up;
- before all samples are assigned nothing is given up.
"""

from verl_fuse.spec.step import Migration, ReplicaView, RolloutView


def released(view: RolloutView, cut_fraction: float) -> Migration | None:
    """The replicas that go on, or None while all do. Gives up those that are done, or else one that is nearly."""
    routed = [replica for replica in view.replicas if replica.routed]
    if len(routed) < 2 or sum(replica.assigned for replica in view.replicas) < view.expected:
        return None
    kept = [replica for replica in routed if replica.running or replica.unfinished]
    if len(kept) < len(routed):
        return Migration(tuple(replica.rank for replica in (kept or routed[:1])))
    nearly = [replica for replica in routed if _nearly_done(replica, cut_fraction)]
    for replica in sorted(nearly, key=lambda replica: (replica.running, replica.rank)):
        others = [other for other in routed if other is not replica]
        if sum(max(0, other.slots - other.running) for other in others) >= replica.running:
            return Migration(tuple(other.rank for other in others))
    return None


def _nearly_done(replica: ReplicaView, cut_fraction: float) -> bool:
    if cut_fraction >= 1 or not replica.unfinished:
        return False
    return replica.assigned - replica.unfinished >= cut_fraction * replica.assigned
