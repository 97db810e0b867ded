"""Find the part of the block that can gain something in a run. Pure: values in, a block and a sentence out.

Invariants (tests/unit/interstage/test_gains.py):
- without inference that can be streamed the plugin does nothing, whatever the block asks for; with streamed updates and
  slices the tail still migrates, because the devices of a freed replica train;
- without slices nothing migrates: the training workers run inference on all devices at once, so the devices of a freed
  replica have nothing to do alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from verl_fuse.spec.step import Stage
from verl_fuse_interstage.config import InterstageConfig


def in_force(
    block: InterstageConfig, stages: Sequence[Stage], streams: bool = False
) -> tuple[InterstageConfig, str | None]:
    """Return the part of an enabled block that can gain something where samples go through `stages` and updates are
    streamed or not (`streams`), and a sentence that names the part left out, or None."""
    if not stages and streams and block.layout == "slices" and block.migration_threshold:
        return block, None
    if not stages:
        said = (
            "fuse.interstage.enabled=true: nothing can be streamed, because verl computes no log-probs or values here "
            "(no KL penalty, no critic or one of fuse.placement or with fuse.update.skip_values=true, "
            "algorithm.rollout_correction.bypass_mode=true or fuse.update.skip_old_log_prob=true); nothing migrates, "
            "no slices are built, steps run as in stock verl"
        )
        return replace(block, enabled=False), said
    if block.layout != "slices" and block.migration_threshold:
        said = (
            f"fuse.interstage.migration_threshold={block.migration_threshold!r}: nothing migrates while "
            "fuse.interstage.layout=shared, because inference runs on all training workers at once and the devices of "
            "a freed replica would have nothing to do; set fuse.interstage.layout=slices, or null"
        )
        return replace(block, migration_threshold=None), said
    return block, None
