"""Runs inference on single samples: finished samples go through old log-prob, reference and values in micro-groups;
stage barriers complete the rest.

A micro-group runs either on the training workers, through the trainer's stock stage methods, or on a slice, which
computes all stages in one call. A stage barrier computes the rows of no micro-group (padding rows included, because
they are created after streaming) with verl's own stage call and then checks that no field is missing.

Invariants (tests/integration/test_inference_barrier.py):
- a sample is handed to a lane at most once, and only when it is finished;
- no batch passes a barrier before every lane has done its work;
- a sample's rows stay in TransferQueue until the lane that has it is done, also where its group is discarded;
- with nothing streamed a barrier is exactly verl's own stage call on the whole batch;
- the rest of a batch is topped up with computed rows until its size fits the workers, never truncated.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from transfer_queue import KVBatchMeta

from verl_fuse.host.inference.completeness import require_complete
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.micro_groups import Prompts, share, spread, top_up
from verl_fuse.host.upstream.rows import rows, tags_of
from verl_fuse.spec.step import LaneView, Stage
from verl_fuse.spec.trajectory import TrajectoryKey

# A stock stage method of the trainer: computes the fields of its stage for a batch, adds metrics, returns the batch.
StageCall = Callable[[KVBatchMeta, dict], KVBatchMeta]
# Numbered micro-groups, each with one of its stages. Slices are alike, so a free one takes the first.
Pieces = deque[tuple[int, Sequence[str], Stage]]


@dataclass(frozen=True)
class SliceLane:
    """A slice: `infer(keys, tags, stages)` computes these stages for these rows, cut into `dp_size` parts; the number
    of rows must be a multiple of `multiple`."""

    lane: Lane
    infer: Callable[[Sequence[str], Mapping[str, dict], Sequence[Stage]], None]
    dp_size: int
    multiple: int


class SampleInference:
    """Inference of one step over the lane of the training workers and any number of slices.

    `calls` are verl's stage methods; `dp_size` is the number of data-parallel ranks; `multiples` is, per stage, the
    number of which a batch's size must be a multiple; `fields` are the fields that each stage must leave behind.
    `beside`: the samples also go through inference of another object, which counts them; its micro-groups have numbers.
    """

    def __init__(
        self,
        lane: Lane,
        calls: Mapping[Stage, StageCall],
        dp_size: int,
        multiples: Mapping[Stage, int],
        fields: Mapping[Stage, Sequence[str]],
        extra_info: Mapping[str, Any],
        beside: bool = False,
    ):
        self._lane = lane
        self._beside = beside
        self._slices: dict[str, SliceLane] = {}
        self._share_prompts = False
        self._calls = calls
        self._dp_size = dp_size
        self._multiples = multiples
        self._fields = fields
        self._extra_info = extra_info
        self.begin_step()

    def use_slices(self, slices: Sequence[SliceLane], share_prompts: bool = False) -> None:
        """Offer policies these slices instead of the training workers from now on; with `share_prompts` their ranks
        compute each prompt once."""
        self._slices = {slice.lane.name: slice for slice in slices}
        self._share_prompts = share_prompts
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's samples."""
        self._taken: set[str] = set()
        self._in_flight: list[tuple[frozenset[str], Lane, str, Future]] = []
        # Samples that were computed, or about to be, when their group was discarded.
        self.discarded = 0
        self._done: dict[Stage, set[str]] = {stage: set() for stage in self._calls}
        self._micro_groups = 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages that micro-groups go through, in order."""
        return tuple(self._calls)

    @property
    def taken(self) -> frozenset[str]:
        """Return the keys handed to a lane in this step."""
        return frozenset(self._taken)

    def view(self, released: Collection[int]) -> tuple[LaneView, ...]:
        """Return views of the lanes that a policy may use: the slices of `released` replicas, or the training workers'
        lane where there are no slices."""
        if not self._slices:
            multiple = math.lcm(*(self._multiples[stage] for stage in self._calls))
            return (LaneView(self._lane.name, self.stages, self._lane.queued, multiple),)
        return tuple(
            LaneView(name, self.stages, slice.lane.queued, slice.multiple, released=True)
            for number, (name, slice) in enumerate(self._slices.items())
            if number in released
        )

    def submit(self, keys: Sequence[str], tags: Mapping[str, dict], lane: str | None = None) -> None:
        """Hand one micro-group of ready samples to a lane (default: the training workers'); `tags` are the rollout's
        tags by key."""
        index, slice = self._number(), self._slices.get(lane or "")
        mine = {key: dict(tags[key]) for key in keys}
        what = f"micro-group {index} ({len(keys)} samples)"
        if slice is None:
            self._hand_over(self._lane, partial(self._run, index, keys, mine), keys, what)
        else:
            self._hand_over(slice.lane, partial(self._run_on, slice, index, keys, mine, self.stages), keys, what)

    def discard(self, keys: Collection[str]) -> None:
        """Wait for the micro-groups that read and write the rows of `keys`, which are about to be cleared."""
        busy = [place for place, (members, *_) in enumerate(self._in_flight) if not members.isdisjoint(keys)]
        for lane in {self._in_flight[place][1] for place in busy}:
            last = max(place for place in busy if self._in_flight[place][1] is lane)
            # The order is that in which a lane runs calls: a call's time begins when the call before ends.
            for _, on, what, future in self._in_flight[: last + 1]:
                if on is lane:
                    lane.wait(future, what)
        self.discarded += len(self._taken.intersection(keys))

    def submit_rest(self, tags: Mapping[str, dict]) -> None:
        """Leave all samples that no lane has taken to the slices; generation is over, so no sample will follow. The
        samples are cut into one micro-group per slice, and a slice that is free takes the next stage of any of them.
        The barriers take the samples that fit no micro-group."""
        if not self._slices:
            return
        lengths = {key: int(tag["seq_len"]) for key, tag in tags.items() if key not in self._taken}
        multiples = {name: slice.multiple for name, slice in self._slices.items()}
        groups = share(lengths, multiples, _prompts(lengths, tags) if self._share_prompts else {})
        pieces: Pieces = deque((self._number(), keys, stage) for stage in self.stages for keys in groups.values())
        mine = {key: dict(tags[key]) for members in groups.values() for key in members}
        for slice in self._slices.values() if pieces else ():
            work = partial(self._run_pieces, slice, pieces, mine)
            self._hand_over(slice.lane, work, tuple(mine), f"the last {len(mine)} samples")

    def has_computed(self, keys: Collection[str]) -> bool:
        """Tell whether these samples have gone through all stages."""
        return all(set(keys) <= done for done in self._done.values())

    def lane_at(self, number: int) -> Lane | None:
        """Return the lane of the slice on the devices of replica `number`; None without slices."""
        slices = list(self._slices.values())
        return slices[number].lane if slices else None

    def check(self) -> None:
        """Raise the failure of any lane."""
        self._lane.check()
        for slice in self._slices.values():
            slice.lane.check()

    def drain(self) -> None:
        """Wait until every lane has done its work."""
        self._lane.drain()
        for slice in self._slices.values():
            slice.lane.drain()

    def finish(self) -> None:
        """Wait for the micro-groups that were handed over, and for no other call on their lanes."""
        flights, self._in_flight = self._in_flight, []
        for _, on, what, future in flights:
            on.wait(future, what)
        self.check()

    def _number(self) -> int:
        self._micro_groups += 1
        return self._micro_groups - 1

    def _hand_over(self, lane: Lane, work: Callable[[], None], keys: Sequence[str], what: str) -> None:
        self._taken.update(keys)
        self._in_flight = [flight for flight in self._in_flight if not flight[-1].done()]
        self._in_flight.append((frozenset(keys), lane, what, lane.submit(work, what)))

    def _run_pieces(self, slice: SliceLane, pieces: Pieces, tags: Mapping[str, dict]) -> None:
        while True:
            try:
                index, keys, stage = pieces.popleft()
            except IndexError:
                return
            self._run_on(slice, index, keys, tags, (stage,))

    def _run_on(
        self, slice: SliceLane, index: int, keys: Sequence[str], tags: Mapping[str, dict], stages: Sequence[Stage]
    ) -> None:
        # A sample counts where its first stage is computed.
        samples = len(keys) if self.stages[0] in stages else 0
        order = _spread(keys, tags, slice.dp_size, self._share_prompts)
        work = partial(slice.infer, order, tags, stages)
        slice.lane.recorded("micro-group", "inference", work, samples=samples, micro_group=index)
        for stage in stages:
            self._done[stage].update(keys)

    def _run(self, index: int, keys: Sequence[str], tags: Mapping[str, dict]) -> None:
        keys = _spread(keys, tags, self._dp_size)
        info: Mapping[str, Any] | None = self._extra_info
        # The number is one micro-group's of the step, and a sample counts once.
        named = {"samples": 0, "micro_group": f"{self._lane.name} {index}"} if self._beside else {}
        named = named or {"samples": len(keys), "micro_group": index}
        for stage, call in self._calls.items():
            batch = rows(keys, tags, info)
            done = self._lane.recorded(stage, "inference", partial(call, batch, {}), **named)
            # verl hands one batch from stage to stage, and the extra_info that a stage leaves reaches the next stage.
            info = done.extra_info
            self._done[stage].update(keys)

    def complete(
        self, stage: Stage, batch: KVBatchMeta, metrics: dict, whole_batch_metrics: Callable[[KVBatchMeta], dict]
    ) -> KVBatchMeta:
        """Complete a stage at its barrier: afterwards every row of `batch` holds the stage's fields.

        `whole_batch_metrics` recomputes the metrics a stage call derives from its batch, for a batch that was computed
        in parts.
        """
        self.drain()
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
        tags = tags_of(batch)
        return rows(_spread([batch.keys[row] for row in chosen], tags, self._dp_size), tags, batch.extra_info)


def _spread(keys: Sequence[str], tags: Mapping[str, dict], parts: int, share_prompts: bool = False) -> list[str]:
    lengths = {key: int(tags[key]["seq_len"]) for key in keys}
    return spread(keys, lengths, parts, _prompts(keys, tags) if share_prompts else {})


def _prompts(keys: Iterable[str], tags: Mapping[str, dict]) -> Prompts:
    """Return the prompts that samples share; later turns of a conversation count for themselves."""
    parsed = {key: TrajectoryKey.parse(key) for key in keys}
    return {key: (one.uid, int(tags[key]["prompt_len"]) - 1) for key, one in parsed.items() if not one.index}
