"""Keeps the finished trajectories of a running step from look to look, so that a look costs in proportion to the new
trajectories.

verl's replay buffer lists all trajectories anew at every look. The record of a step is updated with the list: beside
one look-up of each key, all work is for trajectories that have appeared or disappeared since the last look.

Invariants (tests/unit/host/test_finished.py):
- at every moment the record equals a new count of the buffer's list, in the order in which trajectories were first
seen;
- a key may be listed before its data: only keys with status `success` are finished;
- trajectories of a discarded group, which are listed no more, are forgotten; a sample that a lane has taken is not
ready, and stays finished;
- `changed` names every prompt whose number of samples has changed, in order.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import filterfalse
from typing import Any

from verl_fuse.host.rollout.lengths import LengthTotals
from verl_fuse.spec.step import Sample
from verl_fuse.spec.trajectory import TrajectoryKey

Tags = Mapping[str, Mapping[str, Any]]


class Finished:
    """The finished samples of one step: `tags` by key, in the order in which they were seen."""

    def __init__(self) -> None:
        self.tags: dict[str, dict] = {}
        self._samples: dict[str, Sample] = {}
        self._ready: dict[str, Sample] = {}
        # Trajectories of each session, by prompt uid.
        self._sessions: dict[str, Counter[int]] = {}
        self._groups: dict[str, dict[str, Sample]] = {}
        self._prompts = self._responses = self._longest = 0
        # Samples that left a trajectory: by prompt uid, and all.
        self.counts: Counter[str] = Counter()
        self.samples = 0
        # The prompts of all changes of `counts`, which a reader takes in from the place where it stopped.
        self.changed: list[str] = []
        # Trajectories that are listed no more.
        self.forgotten = 0
        self._ready_now: tuple[Sample, ...] | None = None

    def __len__(self) -> int:
        return len(self.tags)

    def update(self, listed: Mapping[str, dict]) -> None:
        """Take in the current list of the buffer."""
        unknown = list(filterfalse(self.tags.__contains__, listed))
        if len(listed) - len(unknown) < len(self.tags):
            gone = [self._forget(key) for key in self.tags.keys() - listed.keys()]
            if max(gone) == self._longest:
                self._longest = max((int(tag["response_len"]) for tag in self.tags.values()), default=0)
        for key in unknown:
            if (tag := listed[key]).get("status") == "success":
                self._add(key, tag)

    def take(self, keys: Collection[str]) -> None:
        """Mark these samples as taken by a lane."""
        self._ready_now = None
        for key in keys:
            self._ready.pop(key, None)

    @property
    def ready(self) -> tuple[Sample, ...]:
        """Return the samples that no lane has taken, the oldest first."""
        if self._ready_now is None:
            self._ready_now = tuple(self._ready.values())
        return self._ready_now

    def besides(self, taken: Collection[str]) -> tuple[Sample, ...]:
        """Return the samples that are not `taken` by a lane of other workers, the oldest first."""
        return tuple(sample for key, sample in self._samples.items() if key not in taken)

    @property
    def lengths(self) -> LengthTotals:
        return LengthTotals(len(self.tags), self._prompts, self._responses, self._longest)

    def group(self, uid: str) -> list[Sample]:
        """Return the trajectories of this prompt."""
        return list(self._groups.get(uid, {}).values())

    def _add(self, key: str, tag: dict) -> None:
        uid, session, _ = TrajectoryKey.parse(key)
        sample = Sample(key, uid, int(tag["prompt_len"]), int(tag["response_len"]))
        self.tags[key], self._samples[key], self._ready[key] = tag, sample, sample
        self._ready_now = None
        self._groups.setdefault(uid, {})[key] = sample
        here = self._sessions.setdefault(uid, Counter())
        if session not in here:
            self.samples += 1
            self.counts[uid] += 1
            self.changed.append(uid)
        here[session] += 1
        self._prompts += sample.prompt_len
        self._responses += sample.response_len
        self._longest = max(self._longest, sample.response_len)

    def _forget(self, key: str) -> int:
        """Forget a trajectory; return the tokens of its response."""
        tag = self.tags.pop(key)
        self._samples.pop(key)
        self._ready.pop(key, None)
        self._ready_now = None
        self.forgotten += 1
        uid, session, _ = TrajectoryKey.parse(key)
        self._groups[uid].pop(key)
        here = self._sessions[uid]
        here[session] -= 1
        if not here[session]:
            del here[session]
            self.samples -= 1
            self.counts[uid] -= 1
            self.changed.append(uid)
        self._prompts -= int(tag["prompt_len"])
        self._responses -= int(tag["response_len"])
        return int(tag["response_len"])
