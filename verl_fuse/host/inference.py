"""Sample-level inference: finished samples go through old log-prob, reference and values in micro-groups; stage barriers complete the rest.

The numbers are verl's own: every micro-group runs the trainer's stock stage methods on a sub-batch. A stage barrier computes what no
micro-group did (padding rows included, because they are created after streaming) and then checks that nothing is missing.

Invariants (tests/unit/host/test_inference.py):
- a sample is handed to a lane at most once, and only when it is finished;
- with nothing streamed a barrier is exactly verl's own stage call on the whole batch;
- the rest of a batch is topped up with computed rows until its size fits the workers, never truncated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transfer_queue import KVBatchMeta

from verl_fuse.host.completeness import require_complete
from verl_fuse.host.lane import Lane
from verl_fuse.host.rows import rows, tags_of
from verl_fuse.spec.step import LaneView, Sample, Stage

# A stock stage method of the trainer: computes the fields of its stage for a batch, adds metrics, returns the batch.
StageCall = Callable[[KVBatchMeta, dict], KVBatchMeta]


class SampleInference:
    """Inference of one step over one lane.

    `calls` are verl's stage methods; `dp_size` is the number of data-parallel ranks; `multiples` says, per stage, of what a
    batch's size must be a multiple; `fields` are the fields each stage must leave behind.
    """

    def __init__(
        self,
        lane: Lane,
        calls: Mapping[Stage, StageCall],
        dp_size: int,
        multiples: Mapping[Stage, int],
        fields: Mapping[Stage, Sequence[str]],
        extra_info: Mapping[str, Any],
    ):
        self._lane = lane
        self._calls = calls
        self._dp_size = dp_size
        self._multiples = multiples
        self._fields = fields
        self._extra_info = extra_info
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's samples."""
        self._taken: set[str] = set()
        self._done: dict[Stage, set[str]] = {stage: set() for stage in self._calls}
        self._micro_groups = 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that micro-groups go through, in order."""
        return tuple(self._calls)

    @property
    def taken(self) -> frozenset[str]:
        """Keys handed to the lane in this step."""
        return frozenset(self._taken)

    def view(self) -> LaneView:
        """What a policy may know of the lane."""
        multiple = math.lcm(*(self._multiples[stage] for stage in self._calls))
        return LaneView(self._lane.name, self.stages, self._lane.queued, multiple)

    def submit(self, keys: Sequence[str], tags: Mapping[str, dict]) -> None:
        """Hand one micro-group of ready samples to the lane; `tags` are the rollout's tags by key."""
        self._taken.update(keys)
        index = self._micro_groups
        self._micro_groups += 1
        ordered = spread(keys, {key: int(tags[key]["seq_len"]) for key in keys}, self._dp_size)
        mine = {key: dict(tags[key]) for key in keys}
        self._lane.submit(lambda: self._run(index, ordered, mine), f"micro-group {index} ({len(keys)} samples)")

    def _run(self, index: int, keys: list[str], tags: Mapping[str, dict]) -> None:
        info: Mapping[str, Any] | None = self._extra_info
        for stage, call in self._calls.items():
            batch = rows(keys, tags, info)
            done = self._lane.recorded(
                stage, "inference", partial(call, batch, {}), samples=len(keys), micro_group=index
            )
            # verl hands one batch from stage to stage, and what a stage leaves in extra_info reaches the next.
            info = done.extra_info
            self._done[stage].update(keys)

    def complete(
        self, stage: Stage, batch: KVBatchMeta, metrics: dict, whole_batch_metrics: Callable[[KVBatchMeta], dict]
    ) -> KVBatchMeta:
        """Stage barrier: afterwards every row of `batch` holds the stage's fields.

        `whole_batch_metrics` recomputes the metrics a stage call derives from its batch, for a batch that was computed in parts.
        """
        self._lane.drain()
        call = self._calls[stage]
        rest = [row for row, key in enumerate(batch.keys) if key not in self._done[stage]]
        if len(rest) == len(batch):
            self._done[stage].update(batch.keys)
            return self._lane.call(stage, "inference", lambda: call(batch, metrics))
        if rest:
            part = self._part(batch, top_up(rest, [int(tag["seq_len"]) for tag in batch.tags], self._multiples[stage]))
            self._lane.call(stage, "inference", lambda: call(part, metrics))
            batch.extra_info = {**(batch.extra_info or {}), **(part.extra_info or {})}
        self._done[stage].update(batch.keys)
        require_complete(batch, stage, self._fields[stage])
        metrics.update(whole_batch_metrics(batch))
        return batch

    def _part(self, batch: KVBatchMeta, chosen: Sequence[int]) -> KVBatchMeta:
        keys = [batch.keys[row] for row in chosen]
        tags = tags_of(batch)
        return rows(
            spread(keys, {key: int(tags[key]["seq_len"]) for key in keys}, self._dp_size), tags, batch.extra_info
        )


def ready_samples(
    tags: Mapping[str, dict], taken: frozenset[str], make: Callable[[str, dict], Sample]
) -> tuple[Sample, ...]:
    """Finished samples that no lane has taken, in the order TransferQueue lists them (oldest first)."""
    return tuple(make(key, tag) for key, tag in tags.items() if key not in taken)


def spread(keys: Sequence[str], lengths: Mapping[str, int], parts: int) -> list[str]:
    """Reorder keys so that cutting them into `parts` equal runs (how verl dispatches) gives each run a like share of long samples."""
    ranked = sorted(keys, key=lambda key: (-lengths[key], key))
    return [key for part in range(parts) for key in ranked[part::parts]]


def top_up(rows: Sequence[int], lengths: Sequence[int], multiple: int) -> list[int]:
    """Add the shortest other rows until the count is a multiple; all rows if there are too few of them."""
    missing = -len(rows) % multiple
    others = sorted(set(range(len(lengths))) - set(rows), key=lambda row: (lengths[row], row))
    if missing > len(others):
        return list(range(len(lengths)))
    return [*rows, *others[:missing]]
