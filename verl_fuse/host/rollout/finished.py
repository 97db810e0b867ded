"""The finished trajectories of a running step, kept from look to look, so that a look costs by what is new.

verl's replay buffer lists everything anew at every look. Knowledge of a step is brought up to date with that: beside
comparing keys, all work is for those that were not there before, or are not any more.

Invariants (tests/unit/host/test_finished.py):
- at every moment it is what counting the buffer's list anew would find, in the order in which
  trajectories were first seen;
- a key may be listed before its data: only those with status `success` are finished;
- trajectories of a discarded group, which are listed no more, are forgotten; what a lane has taken is not
  ready, and stays finished.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from verl_fuse.host.rollout.lengths import LengthTotals
from verl_fuse.spec.step import Sample
from verl_fuse.spec.trajectory import TrajectoryKey

Tags = Mapping[str, Mapping[str, Any]]


class Finished:
    """The finished samples of one step: `tags` by key, in the order in which they were seen."""

    def __init__(self) -> None:
        self.tags: dict[str, dict] = {}
        self._ready: dict[str, Sample] = {}
        # Trajectories of each session, by prompt uid.
        self._sessions: dict[str, Counter[int]] = {}
        self._groups: dict[str, dict[str, Sample]] = {}
        self._prompts = self._responses = self._longest = 0
        # Samples that left a trajectory.
        self.samples = 0

    def __len__(self) -> int:
        return len(self.tags)

    def update(self, listed: Mapping[str, dict]) -> None:
        """Take in what the buffer lists now."""
        new = [(key, tag) for key, tag in listed.items() if key not in self.tags and tag.get("status") == "success"]
        for key in self.tags.keys() - listed.keys():
            self._forget(key)
        for key, tag in new:
            self._add(key, tag)

    def take(self, keys: Collection[str]) -> None:
        """A lane has these now."""
        for key in keys:
            self._ready.pop(key, None)

    @property
    def ready(self) -> tuple[Sample, ...]:
        """The samples that no lane has taken, the oldest first."""
        return tuple(self._ready.values())

    @property
    def lengths(self) -> LengthTotals:
        return LengthTotals(len(self.tags), self._prompts, self._responses, self._longest)

    def samples_of(self, uid: str) -> int:
        """Samples of this prompt that left a trajectory."""
        return len(self._sessions.get(uid, ()))

    def group(self, uid: str) -> list[Sample]:
        """The trajectories of this prompt."""
        return list(self._groups.get(uid, {}).values())

    def _add(self, key: str, tag: dict) -> None:
        uid, session, _ = TrajectoryKey.parse(key)
        sample = Sample(key, uid, int(tag["prompt_len"]), int(tag["response_len"]))
        self.tags[key], self._ready[key] = tag, sample
        self._groups.setdefault(uid, {})[key] = sample
        here = self._sessions.setdefault(uid, Counter())
        self.samples += session not in here
        here[session] += 1
        self._prompts += sample.prompt_len
        self._responses += sample.response_len
        self._longest = max(self._longest, sample.response_len)

    def _forget(self, key: str) -> None:
        tag = self.tags.pop(key)
        self._ready.pop(key, None)
        uid, session, _ = TrajectoryKey.parse(key)
        self._groups[uid].pop(key)
        here = self._sessions[uid]
        here[session] -= 1
        if not here[session]:
            del here[session]
            self.samples -= 1
        self._prompts -= int(tag["prompt_len"])
        self._responses -= int(tag["response_len"])
        self._longest = max((int(tag["response_len"]) for tag in self.tags.values()), default=0)
