"""Tells of the groups that a running step discards: dynamic sampling drops groups of equal rewards, and a sampler may
replace groups that failed. verl asks for others until it has a batch, and says nothing meanwhile.

Invariants (tests/unit/host/test_discards.py):
- in a step that discards groups, a line every TELL_SECONDS has the groups generated, discarded and kept;
- once BATCHES_IN_VAIN batches were discarded and no group was kept meanwhile, one warning a step says why, and what to
change.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from verl_fuse.host.names import LOG_PREFIX
from verl_fuse.host.upstream.rows import TRAIN

TELL_SECONDS = 30.0
BATCHES_IN_VAIN = 4
# A line has so many reasons, the most frequent ones.
MOST_REASONS = 3
FAILED, UNSAID = "failed", "for the sampler's own reason"

logger = logging.getLogger(__name__)


class Discards:
    """The discarded groups of verl's replay buffer, step by step."""

    def __init__(self, buffer: Any):
        self._buffer = buffer
        self.begin_step()

    def begin_step(self) -> None:
        """Begin to count anew."""
        self._reasons: Counter[str] = Counter()
        self._told = time.monotonic()
        # Kept groups, and the number of discarded ones when the last group was kept.
        self._kept, self._before = 0, 0
        self._warned = False

    def note(self, uids: Iterable[str]) -> None:
        """Count groups that are about to be discarded."""
        b = self._buffer
        # What verl's filter found: the one value of all samples of a group, None where they differ.
        shared = b._dapo_classification_cache[TRAIN]
        for uid in uids:
            if (value := shared.get(uid)) is not None:
                # A sampler of a user's own may keep anything here.
                said = f"{value:g}" if isinstance(value, int | float) else str(value)
                self._reasons[f"with {b.filter_groups_metric} {said} throughout"] += 1
            else:
                self._reasons[FAILED if uid in b.failure_keys[TRAIN] else UNSAID] += 1

    def tell(self, kept: int) -> None:
        """Say what is due at a look at the rollout; `kept` groups may be trained on."""
        discarded, now = self._reasons.total(), time.monotonic()
        if not discarded:
            return
        if kept != self._kept:
            self._kept, self._before = kept, discarded
        # A sampler of a user's own need not know the batch size.
        batch = self._buffer.train_batch_size or self._kept + 1
        if discarded - self._before >= BATCHES_IN_VAIN * batch and not self._warned:
            self._warned = True
            logger.warning(
                "%d groups were discarded and none was kept meanwhile (%s). %s",
                discarded - self._before, self._why(), self._advice(),
            )  # fmt: skip
        if now - self._told >= TELL_SECONDS:
            self._told = now
            print(
                f"{LOG_PREFIX}{discarded + kept} groups generated in this step: {discarded} discarded "
                f"({self._why()}), {kept} kept",
                flush=True,
            )

    def _why(self) -> str:
        found = self._reasons.most_common()
        shown = ", ".join(f"{count} {reason}" for reason, count in found[:MOST_REASONS])
        return shown + (", …" if len(found) > MOST_REASONS else "")

    def _advice(self) -> str:
        reason = self._reasons.most_common(1)[0][0]
        if reason == UNSAID:
            return "The sampler discards them: trainer.v1.sampler"
        if reason == FAILED:
            return (
                "Groups that failed are replaced (trainer.v1.sampler.sync_refill_failed_groups=true): the log has the "
                "errors of their agent loops"
            )
        return (
            "A group whose samples are all rewarded alike has no gradient, and algorithm.filter_groups discards it: "
            "the run needs prompts that are neither too easy nor too hard (data.train_files), more samples of each "
            "(actor_rollout_ref.rollout.n), a reward that tells samples apart, or algorithm.filter_groups.enable=false"
        )
