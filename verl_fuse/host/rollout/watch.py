"""Looks at the running rollout: every poll of verl's replay buffer becomes a RolloutView, a rollout that stands still
ends loudly, and prompt groups that are discarded without being trained on are remembered.

Works on whatever replay buffer verl built, a user's custom sampler included: the instance's poll seam (replay_buffer.py
`_wait_for_next_poll`), its list of all samples (`_sync_metadata_from_transfer_queue`) and its seam for discarding
groups (`_clear_groups`) are wrapped, and nothing else.
"""

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tensordict import TensorDict

from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.discards import Discards
from verl_fuse.host.rollout.finished import Finished
from verl_fuse.host.rollout.prompts import places_of, shown
from verl_fuse.host.upstream.rows import TRAIN, response_tokens
from verl_fuse.host.upstream.watchdog import diagnosis
from verl_fuse.spec.step import VERL_POLL_INTERVAL, Sample
from verl_fuse.spec.trajectory import TrajectoryKey

# Listing the samples takes at most this share of the driver's time.
MOST_LISTING = 0.02
# Policies are asked again after this many seconds although no event has happened.
STEADY = 0.5


class Glance:
    """Decides whether a look at the rollout is worth asking all policies: the rollout has changed, or `STEADY` seconds
    have passed.

    A question costs the load balancer and the driver a few milliseconds, which busy cores take from generation.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, float] = (None, -STEADY)

    def due(self, state: Any) -> bool:
        seen, since = self._seen
        now = time.monotonic()
        if state == seen and now - since < STEADY:
            return False
        self._seen = state, now
        return True


class Groups(NamedTuple):
    """Numbers of prompt groups: `known` are all of them."""

    known: int
    finished: int
    failed: int


class RolloutObserver:
    """What a watch of the rollout tells."""

    def forget(self) -> None:
        """Forget what is from before this step or validation."""

    def look(self, watch: "RolloutWatch") -> None:
        """Act at a look at the training partition."""

    def before_wait(self, watch: "RolloutWatch") -> None:
        """Act before a wait for any partition."""

    def discard(self, keys: Collection[str]) -> None:
        """Act before these finished trajectories are cleared."""

    def suspects(self, watch: "RolloutWatch") -> list[str]:
        """Return who may hold up a rollout that stands still."""
        return []


class RolloutWatch:
    """A watch of the rollout in `buffer`, which tells its `observers`; `stall_timeout` is seconds without a new sample,
    after which the suspects are named."""

    def __init__(self, buffer: Any, poll_interval: float, stall_timeout: float):
        self.observers: list[RolloutObserver] = []
        self._buffer = buffer
        self._stall_timeout = stall_timeout
        self._poll_interval = poll_interval
        self._wait, self._clear = buffer._wait_for_next_poll, buffer._clear_groups
        buffer._wait_for_next_poll, buffer._clear_groups = self._wait_for_next_poll, self._clear_groups
        # CPU seconds that verl's last list of all samples took.
        self._listing = 0.0
        self._sync, buffer._sync_metadata_from_transfer_queue = buffer._sync_metadata_from_transfer_queue, self._list
        self._discards = Discards(buffer)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget all records from before this step or validation."""
        # Response tokens of each sample of the groups that the step discarded, by prompt uid: an empty list for a group
        # without a trajectory.
        self.discarded: dict[str, list[int]] = {}
        self.finished = Finished()
        # Where a user finds a prompt, by uid.
        self._places: dict[str, str] = {}
        self._discards.begin_step()
        self._progress: tuple[Any, float] = (None, time.monotonic())
        for observer in self.observers:
            observer.forget()

    def submitted(self, batch: TensorDict) -> None:
        """Take in prompts that are about to be generated."""
        self._places |= places_of(batch)

    def look(self) -> None:
        """Look now, without waiting: replayed rollouts are complete at once."""
        self._buffer._sync_metadata_from_transfer_queue()
        self._look()

    def _look(self) -> None:
        self.finished.update(self._buffer.partitions[TRAIN])
        for observer in self.observers:
            observer.look(self)

    def complete(self, samples_of: Callable[[str], int]) -> dict[str, list[Sample]]:
        """Return the trajectories of the groups whose rollout has ended with all their samples, by prompt uid."""
        ended = self._buffer.finished_keys[TRAIN]
        return {uid: self.finished.group(uid) for uid in ended if self.finished.counts[uid] == samples_of(uid)}

    def missing(self, samples_of: Callable[[str], int]) -> dict[str, int]:
        """Return the number of samples that groups whose rollout has ended did not leave, by prompt uid."""
        ended = (*self._buffer.finished_keys[TRAIN], *self._buffer.failure_keys[TRAIN])
        absent = {uid: samples_of(uid) - self.finished.counts[uid] for uid in ended}
        return {uid: count for uid, count in absent.items() if count > 0}

    @property
    def unfinished(self) -> dict[str, str]:
        """Return uid -> where a user finds the prompt, of the prompt groups of training and validation whose rollout
        has not ended."""
        waiting = set().union(*self._buffer.pending_keys.values(), *self._buffer.running_keys.values())
        return {uid: self._places.get(uid, "") for uid in sorted(waiting)}

    def now(self) -> tuple[dict[str, str], int]:
        """List the samples anew; return the `unfinished` prompts, and the number of groups that have failed."""
        self._buffer._sync_metadata_from_transfer_queue()
        return self.unfinished, sum(map(len, self._buffer.failure_keys.values()))

    @property
    def groups(self) -> Groups:
        """Return the numbers of the step's prompt groups."""
        b = self._buffer
        finished, failed = len(b.finished_keys[TRAIN]), len(b.failure_keys[TRAIN])
        return Groups(len(b.pending_keys[TRAIN]) + len(b.running_keys[TRAIN]) + finished + failed, finished, failed)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if partition_id == TRAIN:
            self._look()
            self._discards.tell(self.groups.finished + self.groups.failed)
        for observer in self.observers:
            observer.before_wait(self)
        self._check_progress(partition_id)
        self._buffer.poll_interval = self._pace()
        return self._wait(partition_id, last_debug_time)

    def _list(self) -> None:
        begun = time.thread_time()
        self._sync()
        self._listing = time.thread_time() - begun

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        if partition_id == TRAIN:
            self.finished.update(self._buffer.partitions[TRAIN])
            tags = {key: tag for key, tag in self.finished.tags.items() if TrajectoryKey.parse(key).uid in uids}
            self.discarded |= {uid: [] for uid in uids} | response_tokens(tags)
            self._discards.note(uids)
            for observer in self.observers:
                observer.discard(tags)
        self._clear(partition_id, uids)

    def _suspects(self) -> list[str]:
        return [name for observer in self.observers for name in observer.suspects(self)]

    def _pace(self) -> float:
        """Return the seconds to the next look. verl lists all samples at each look, which costs CPU time in proportion
        to the batch and competes with the lane's thread: at most the share MOST_LISTING of the time goes into listing,
        but the pace is never slower than verl's own. Submission and decisions count for nothing here: they cost time
        where something has changed."""
        return max(self._poll_interval, min((1 / MOST_LISTING - 1) * self._listing, VERL_POLL_INTERVAL))

    def _check_progress(self, partition_id: str) -> None:
        b, finished = self._buffer, self.finished
        if partition_id != TRAIN:
            finished.update(b.partitions[partition_id])
        ended = len(b.finished_keys[partition_id]), len(b.failure_keys[partition_id])
        seen, (before, since), now = (len(finished), len(self.discarded), *ended), self._progress, time.monotonic()
        if seen != before:
            self._progress = (seen, now)
        elif now - since > self._stall_timeout:
            waiting = self.unfinished
            raise FuseError(
                f"the rollout made no progress for {now - since:.0f} s: {finished.samples} samples finished, still "
                f"waiting for {len(waiting)} prompt groups: {shown(waiting)}; held up by: "
                f"{diagnosis(self._suspects)} (fuse.stall_timeout)"
            )
