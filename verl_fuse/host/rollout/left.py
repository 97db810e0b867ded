"""Counts the samples that a running step has left, by replica, from look to look, so that a look costs in proportion to
the prompts that have changed.

Invariants (tests/unit/host/test_left.py):
- at every moment the counts equal a new count over all prompts;
- a discarded group is left out of all counts, and no sample of a prompt counts below 0;
- nothing is left of a group that has ended, whatever it did not leave;
- prompts without a replica count in the totals, and in no replica.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from verl_fuse.host.rollout.finished import Finished
from verl_fuse.spec.prompts import Prompt


class SamplesLeft:
    """The counts of one plan: `prompts` by uid, and the replica of each (`homes`). A step has one `Finished`, and its
    discarded and ended groups only grow; another `Finished` begins anew."""

    def __init__(self, prompts: Mapping[str, Prompt], homes: Mapping[str, int]):
        self._prompts, self._homes = prompts, homes
        self._finished: Finished | None = None

    def look(self, finished: Finished, discarded: Collection[str], ended: Collection[str] = ()) -> None:
        """Take in the samples that are `finished`, the `discarded` groups, and those that have `ended` with samples
        missing."""
        if finished is not self._finished or len(discarded) < self._discarded:
            self._begin(finished)
        for uid in finished.changed[self._seen :]:
            self._update(uid, discarded)
        self._seen = len(finished.changed)
        if len(discarded) > self._discarded:
            for uid in discarded:
                self._update(uid, discarded)
            self._discarded = len(discarded)
        for uid in self._left.keys() & (set(ended) - self._ended):
            self._ended.add(uid)
            self._update(uid, discarded)

    def of(self, uid: str) -> int:
        """Return the samples that this prompt has left."""
        return self._left.get(uid, 0)

    @property
    def upper(self) -> float | None:
        """Return the mean of the upper predictions of all samples left; None where nothing is left, or where a prompt
        has no prediction."""
        return None if self._unpredicted or not self._total else self._upper / self._total

    def _begin(self, finished: Finished) -> None:
        self._finished, self._seen, self._discarded = finished, 0, 0
        self._ended: set[str] = set()
        self._left = {uid: prompt.samples for uid, prompt in self._prompts.items()}
        self.assigned: Counter[int] = Counter()
        self.unfinished: Counter[int] = Counter()
        for uid, rank in self._homes.items():
            self.assigned[rank] += self._left[uid]
        self.unfinished.update(self.assigned)
        self._total = sum(self._left.values())
        predictions = [(prompt.prediction, prompt.samples) for prompt in self._prompts.values()]
        self._unpredicted = sum(prediction is None for prediction, _ in predictions)
        self._upper = sum(prediction.upper * samples for prediction, samples in predictions if prediction is not None)

    def _update(self, uid: str, discarded: Collection[str]) -> None:
        if uid not in self._left:
            return
        assert self._finished is not None, "look before update"
        prompt, home = self._prompts[uid], self._homes.get(uid)
        gone = uid in discarded
        less = self._left[uid] - (
            0 if gone or uid in self._ended else max(0, prompt.samples - self._finished.counts[uid])
        )
        self._left[uid] -= less
        self._total -= less
        if prompt.prediction is not None:
            self._upper -= less * prompt.prediction.upper
        if home is not None:
            self.unfinished[home] -= less
        if gone:
            del self._left[uid]
            self._unpredicted -= prompt.prediction is None
            if home is not None:
                self.assigned[home] -= prompt.samples
