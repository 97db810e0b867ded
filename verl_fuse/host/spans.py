"""Collects spans of all Ray processes of a run in one place.

A process records through `record`, which sends to the run's collector actor and does not wait for the answer. Times are each
node's wall clock, so spans of different nodes are as well aligned as the nodes' clocks. Where no run has a collector (verl-fuse
installed, another trainer mode), nothing records.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from verl_fuse.spec.timeline import Category, Span

COLLECTOR = "verl_fuse_spans"


class SpanCollector:
    """Ray actor: keeps spans until the driver drains them."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def drain(self) -> list[Span]:
        """All spans added since the last drain."""
        spans, self._spans = self._spans, []
        return spans


def start_collector() -> Any:
    """Start the run's collector in this job's Ray namespace; returns its handle, which the caller must keep alive."""
    return ray.remote(num_cpus=0)(SpanCollector).options(name=COLLECTOR).remote()


class Stopwatch:
    """A start on the wall clock, and a duration that a wall clock set back cannot make negative."""

    def __init__(self) -> None:
        self.start = time.time()
        self._begin = time.monotonic()

    @property
    def now(self) -> float:
        """Unix seconds: the start plus what has passed since."""
        return self.start + time.monotonic() - self._begin


class Recorder:
    """Records spans of one process, to the collector or to any other `sink`."""

    def __init__(self, sink: Callable[[Span], object]):
        self.add = sink

    @contextmanager
    def span(self, name: str, track: str, category: Category, **args: str | int | float) -> Iterator[dict[str, Any]]:
        """Record the block as one span; entries put into the yielded dict become its args. A failing block is recorded too."""
        watch = Stopwatch()
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.add(Span(name, track, category, watch.start, watch.now, args))


def remote_recorder() -> Recorder:
    """The recorder of a Ray worker process, sending to this job's collector."""
    collector: Any = ray.get_actor(COLLECTOR)
    return Recorder(collector.add.remote)
