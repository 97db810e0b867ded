"""Longest first: long samples cost most, so they gain most from running while others still generate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_fuse.hookspecs import Trainer, hookimpl
from verl_fuse.spec.block import bounded
from verl_fuse.spec.step import LaneView, Migration, RolloutView
from verl_fuse.spec.timeline import Timeline


@dataclass(frozen=True)
class AcmeConfig:
    """The block `fuse.acme`."""

    largest_micro_group: int = field(default=8, metadata=bounded(minimum=1))
    # Replicas are freed when this share of the samples is left; 0: never.
    tail: float = field(default=0.25, metadata=bounded(minimum=0.0, maximum=1.0))


class LongestFirst:
    """Gives an idle lane the longest samples that are ready; lets the busier half of the replicas finish the tail."""

    HOOK_API = 2

    def __init__(self) -> None:
        self.config = AcmeConfig()

    @hookimpl
    def fuse_config(self) -> type:
        return AcmeConfig

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        self.config = trainer.block("acme")

    @hookimpl
    def fuse_infer_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        size = min(self.config.largest_micro_group, len(view.ready)) // lane.multiple * lane.multiple
        if lane.queued or size == 0:
            return None
        longest = sorted(view.ready, key=lambda sample: sample.seq_len, reverse=True)
        return [sample.key for sample in longest[:size]]

    @hookimpl
    def fuse_migration(self, view: RolloutView) -> Migration | None:
        busiest = sorted((one for one in view.replicas if one.routed), key=lambda one: -one.running)
        kept = busiest[: (len(busiest) + 1) // 2]
        due = 0 < view.unfinished <= self.config.tail * view.expected
        has_room = sum(one.slots for one in kept) >= view.unfinished
        if not due or not has_room or len(kept) == len(busiest) or len(busiest) < len(view.replicas):
            return None
        return Migration(tuple(sorted(one.rank for one in kept)))

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float] | None:
        seconds = [span.seconds for span in timeline.spans if span.category == "generate"]
        return {"acme/longest_generation_seconds": max(seconds)} if seconds else None
