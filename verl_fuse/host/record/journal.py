"""Keeps the journal of a run: spans, events, and the account of every step."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError
from transfer_queue import KVBatchMeta

from verl_fuse.host.record.accounting import account, recorded
from verl_fuse.host.record.clocks import NodeClocks
from verl_fuse.host.record.spans import Recorder
from verl_fuse.host.record.step import Step
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.rows import prompt_indices
from verl_fuse.spec.events import Event, StageBegun
from verl_fuse.spec.timeline import BALANCE, DRAIN, EXPORT_WHOLE, LANE, PLANNED_SECONDS, STEP, Category, Span, Timeline

logger = logging.getLogger(__name__)

# Stages of ours that verl's timers leave out: they lie between verl's stages.
UNTIMED = (DRAIN, BALANCE, EXPORT_WHOLE)
# The collector may take this many seconds to hand over the spans of a step.
DRAIN_SECONDS = 60.0


class Journal:
    """The journal of one run: `collector` is the actor that other processes send their spans to, `planned` the seconds
    that a plan foresees for stages of a step."""

    def __init__(self, hook: Any, collector: Any, planned: Mapping[str, float] = MappingProxyType({})):
        self._hook = hook
        self._collector = collector
        self._planned = planned
        self.recorder = Recorder(lambda span: self.step.spans.append(span))
        self.step = Step(0, 0, 0)
        self._unwritten_accounts = 0
        self._clocks: NodeClocks | None = None

    def begin_step(self, number: int, prompts: int, samples_each: int) -> None:
        """Begin a step: every later record belongs to this step."""
        self.step = Step(number, prompts, samples_each)

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Tell observers of an event of this kind, with the event's `fields` beside step and time."""
        self._hook.fuse_event(event=kind(self.step.number, time.time(), **fields))

    @contextmanager
    def stage(self, name: str, category: Category = "stage", **args: float) -> Iterator[dict[str, Any]]:
        """Record the block as a stage of the step, with `args` and the entries put into the yielded dict."""
        self.emit(StageBegun, name=name)
        with self.recorder.span(name, STEP, category, **args) as said:
            yield said

    def account(self, run_dir: Path, batch: KVBatchMeta, replayed: bool, expected: int) -> Mapping[str, float]:
        """Account for the batch that the step trains on, of `expected` samples, write the account, and return its
        metrics. A `replayed` batch comes from disk, of any weights."""
        step = self.step
        version = None if replayed else step.number - 1
        step.account = account(step.number, batch.keys, batch.tags, expected, version)
        self._unwritten_accounts += not recorded(run_dir, step.account, prompt_indices(batch))
        return step.account.metrics()

    def metrics(self, timeline: Timeline) -> dict[str, float]:
        """Return the seconds of stages that verl does not time, the planned seconds, and the number of accounts that
        could not be written."""
        untimed = {f"timing_s/{span.name}": span.end - span.start for span in timeline.on(STEP) if span.name in UNTIMED}
        planned = {f"fuse/{PLANNED_SECONDS}/{stage}": seconds for stage, seconds in self._planned.items()}
        return {**untimed, **planned, "fuse/account_write_failures": float(self._unwritten_accounts)}

    def timeline(self, run: str, named: Callable[[Span], Span]) -> Timeline:
        """Return the spans of the step, of all processes, each `named` for its reader."""
        try:
            remote = self._on_one_clock(ray.get(self._collector.drain.remote(), timeout=DRAIN_SECONDS))
        except RayError as error:
            logger.warning("the timeline has the driver's spans alone: %s", first_line(error))
            remote = []
        start, end = self.step.clock.start, self.step.end
        spans = [named(span) for span in (*self.step.spans, *remote) if span.end > start and span.start < end]
        return Timeline(run, self.step.number, start, end, tuple(self._with_plan(spans)))

    def _with_plan(self, spans: list[Span]) -> Iterator[Span]:
        """Yield the spans; the first span of each planned stage has the planned seconds. A stage that the driver
        hands over has a span on a lane alone."""
        if not (left := dict(self._planned)):
            yield from spans
            return
        for span in sorted(spans, key=lambda span: (span.track != STEP, span.start)):
            known = span.track == STEP or span.track.startswith(LANE)
            if known and span.name in left:
                span = replace(span, args={**span.args, PLANNED_SECONDS: left.pop(span.name)})
            yield span

    def _on_one_clock(self, spans: list[tuple[Span, str]]) -> list[Span]:
        """Shift spans to this node's clock."""
        if self._clocks is None:
            self._clocks = NodeClocks()
        ahead = self._clocks.offsets({node for _, node in spans})
        return [
            replace(span, start=span.start - by, end=span.end - by) if (by := ahead[node]) else span
            for span, node in spans
        ]
