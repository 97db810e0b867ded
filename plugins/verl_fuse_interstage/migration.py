"""When the long tail moves together, and onto which replicas. Pure: values in, a decision out (RLHFuse, section on inter-stage fusion).

Invariants (tests/unit/interstage/test_migration.py):
- nothing moves before at most R_t samples are unfinished, with R_t = 0, or twice in a step;
- the survivors have room for every unfinished sample, and they are the replicas with the most work left;
- at least one replica is freed, or nothing moves.
"""

from dataclasses import dataclass

from verl_fuse.spec.step import Migration, ReplicaView, RolloutView


@dataclass(frozen=True, slots=True)
class Trigger:
    """Migrate once at most `threshold` samples are unfinished (R_t), to at least `survivors` replicas."""

    threshold: int
    survivors: int = 1


def configured(wanted: int | float | None, expected: int) -> Trigger:
    """A whole number is taken as it is, a fraction is of the step's `expected` samples."""
    return Trigger(wanted if isinstance(wanted, int) else int((wanted or 0) * expected))


def tail_migration(trigger: Trigger, view: RolloutView) -> Migration | None:
    """The survivors, once the tail is short enough; None before."""
    if not 0 < view.unfinished <= trigger.threshold:
        return None
    if not all(replica.routed for replica in view.replicas):
        return None
    kept = survivors(view.replicas, view.unfinished, trigger.survivors)
    return Migration(kept) if len(kept) < len(view.replicas) else None


def survivors(replicas: tuple[ReplicaView, ...], unfinished: int, least: int = 1) -> tuple[int, ...]:
    """Ranks of the fewest replicas, `least` at least, with room for `unfinished` samples, busiest first: what they run need not move."""
    kept: list[int] = []
    room = 0
    for replica in sorted(replicas, key=lambda replica: (-replica.running, replica.rank)):
        if len(kept) >= least and room >= unfinished:
            break
        kept.append(replica.rank)
        room += replica.slots
    return tuple(sorted(kept))
