"""Describes the timeline of one training step: spans on tracks.

Invariants (tests/unit/spec/test_timeline.py):
- a span never ends before it starts, and both times are finite;
- `Timeline.from_json(timeline.to_json()) == timeline`, and it reads only a step of finite length > 0 whose fields have
the types declared here;
- spans are kept sorted by (track, start, end, name).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from verl_fuse.errors import FuseError
from verl_fuse.spec.lengths import LONGEST_LENGTH

T = TypeVar("T")
FORMAT_VERSION = 1

Category = Literal["generate", "reward", "inference", "train", "sync", "stage", "wait", "other"]
CATEGORIES: tuple[str, ...] = get_args(Category)
# Tracks: the driver's, and the first word of all others ("lane train", "replica 3").
STEP, LANE, REPLICA, SLICE, RANK = "step", "lane", "replica", "slice", "rank"
# The lane of a critic with workers of its own.
CRITIC_LANE = "critic"
# Stages on the driver's track, in the order of a step, by verl's names where verl times them.
GENERATION, SLEEP, DRAIN, BALANCE = "gen", "sleep", "drain", "balance"
REWARD, OLD_LOG_PROB, REF_LOG_PROB, VALUES, ADVANTAGE = "reward", "old_log_prob", "ref", "values", "adv"
UPDATE_CRITIC, UPDATE_ACTOR, FUSED_UPDATE = "update_critic", "update_actor", "fused_update"
STREAM_UPDATE = "stream_update"
# The critic's update is handed to workers of its own; the driver waits for it.
DEFER_CRITIC, WAIT_FOR_CRITIC = "defer_critic", "wait_for_critic"
SAVE_CHECKPOINT, EXPORT_WHOLE, UPDATE_WEIGHTS = "save_checkpoint", "export_whole", "update_weights"
# The stage `adv` has the shares of the step's samples and of their tokens that have no gradient.
ZERO_GRADIENT_SAMPLES, ZERO_GRADIENT_TOKENS = "zero_gradient_samples", "zero_gradient_tokens"
# The keys are the names of the model calls (spec/workload.py).
CALL_STAGES = {
    "actor_generate": GENERATION,
    "reward_infer": REWARD,
    "reference_infer": REF_LOG_PROB,
    "critic_infer": VALUES,
    "actor_infer": OLD_LOG_PROB,
    "critic_train": UPDATE_CRITIC,
    "actor_train": UPDATE_ACTOR,
}
# A stage's span has the seconds that a plan foresees for it.
PLANNED_SECONDS = "planned_seconds"
INFERENCE_STAGES, TRAIN_STAGES = (OLD_LOG_PROB, REF_LOG_PROB, VALUES), (UPDATE_CRITIC, UPDATE_ACTOR)
# On a replica's track: a request, a request that prefills the samples' common prefix, the replica's start, and its stop
# before the rollout's end.
REQUEST, WARM_REQUEST, START, MIGRATE = "request", "warm", "start", "migrate"
# `stop_reason` of a request whose replica left the rollout.
ABORTED = ("abort", "aborted")
# Arguments of a span that are counted with, where a span has them.
TOKEN_FIELDS = ("prompt_tokens", "response_tokens", "cached_tokens", "resumed_tokens")


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work. `track` is the span's row ("step", "replica 0", "rank 1", "lane
    train"); times are Unix seconds."""

    name: str
    track: str
    category: Category
    start: float
    end: float
    args: Mapping[str, str | int | float] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy in one call: a step sends thousands of spans between processes, and dataclasses copy field by field."""
        return Span, (self.name, self.track, self.category, self.start, self.end, self.args)

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise FuseError(f"span {self.name!r}: category {self.category!r}; allowed: {', '.join(CATEGORIES)}")
        if not (math.isfinite(self.start) and math.isfinite(self.end)) or self.end < self.start:
            raise FuseError(
                f"span {self.name!r} on {self.track!r}: start {self.start}, end {self.end}; need finite start <= end"
            )

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step of one run; `start` and `end` (Unix seconds) bound the step itself."""

    run: str
    step: int
    start: float
    end: float
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(sorted(self.spans, key=attrgetter("track", "start", "end", "name"))))

    @cached_property
    def by_track(self) -> Mapping[str, tuple[Span, ...]]:
        """Return the spans of each track by their start; the tracks by their names."""
        return {track: tuple(spans) for track, spans in groupby(self.spans, attrgetter("track"))}

    @property
    def tracks(self) -> tuple[str, ...]:
        return tuple(self.by_track)

    def on(self, track: str) -> tuple[Span, ...]:
        """Return the spans of `track` by their start."""
        return self.by_track.get(track, ())

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "run": self.run,
                "step": self.step,
                "start": self.start,
                "end": self.end,
                "spans": [[s.name, s.track, s.category, s.start, s.end, dict(s.args)] for s in self.spans],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Parse `to_json` output; a FuseError names the fault of any other text."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != FORMAT_VERSION:
                raise FuseError(f"timeline format {data['format']!r}; this version reads {FORMAT_VERSION}")
            start, end = float(data["start"]), float(data["end"])
            spans = tuple(_span(*fields) for fields in data["spans"])
            found = cls(_typed("run", data["run"], str), _typed("step", data["step"], int), start, end, spans)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FuseError(f"not a verl-fuse timeline: {error!r}") from error
        if not 0 < end - start < math.inf:
            raise FuseError(f"step {found.step}: start {start}, end {end}; needs finite start < end")
        return found


def _span(name: Any, track: Any, category: Any, start: Any, end: Any, args: Any) -> Span:
    """Return a span from its JSON."""
    args = _typed("args", args, dict)
    for key in TOKEN_FIELDS:
        count = args.get(key, 0)
        if type(count) is not int or not 0 <= count <= LONGEST_LENGTH:
            raise FuseError(
                f"span {name!r} on {track!r}: {key}={count!r}; needs a whole number from 0 to {LONGEST_LENGTH}"
            )
    return Span(_typed("name", name, str), _typed("track", track, str), category, float(start), float(end), args)


def _typed(key: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{key}={value!r:.200}; needs {kind.__name__}")
    return value


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of [start, end) intervals, in their unit."""
    return sum(end - start for start, end in merge(intervals))


def merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return sorted, disjoint intervals covering the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap_seconds(left: Iterable[tuple[float, float]], right: Iterable[tuple[float, float]]) -> float:
    """Return the seconds during which both sets of intervals are busy."""
    left, right = merge(left), merge(right)
    return union_seconds(left) + union_seconds(right) - union_seconds([*left, *right])
