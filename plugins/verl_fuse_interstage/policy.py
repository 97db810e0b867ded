"""Which finished samples a lane should run next. Pure: values in, keys out.

Invariants (tests/unit/interstage/test_interstage_policy.py):
- a micro-group's size is a multiple of the lane's `multiple` and at least `micro_group`;
- only samples that are ready are handed out, each once, oldest first;
- nothing is handed out before the start condition holds or to a lane with a full queue; what is left when generation ends is the
  stage barrier's, which computes it in one call.
"""

from collections.abc import Sequence

from verl_fuse.spec.step import LaneView, RolloutView
from verl_fuse_interstage.config import InterstageConfig


def next_micro_group(config: InterstageConfig, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    """Keys of the next micro-group for this lane, or None."""
    size = -(-config.micro_group // lane.multiple) * lane.multiple
    waiting = view.expected and view.unfinished / view.expected > config.start_unfinished_fraction
    if waiting or lane.queued >= config.max_queued or len(view.ready) < size:
        return None
    return [sample.key for sample in view.ready[:size]]
