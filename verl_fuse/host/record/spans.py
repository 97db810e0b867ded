"""Collects in one place the spans of all Ray processes of a run, and the requests that cannot move.

A process records through `record`, which sends to the run's collector actor and does not wait for the answer. A span
comes with the wall clock of its node, and with the node's name, so that the driver may put all spans on one clock
(clocks.py). Where no run has a collector (verl-fuse installed, another trainer mode), no process records.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray

from verl_fuse.spec.timeline import Category, Span

COLLECTOR = "verl_fuse_spans"


class SpanCollector:
    """Ray actor that keeps spans until the driver drains them, and counts requests: those in flight that cannot go on
    at another replica, and those that agents gave up since the last drain, which their servers go on with. It knows the
    servers that clients have found dead."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, str]] = []
        self._unmovable: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._dead: set[str] = set()

    def add(self, span: Span, node: str) -> None:
        """Add a span, timed by the clock of the node of this name."""
        self._spans.append((span, node))

    def drain(self) -> list[tuple[Span, str]]:
        """Return all spans added since the last drain, each with its node."""
        spans, self._spans = self._spans, []
        self._given_up.clear()
        return spans

    def hold(self, server: str) -> None:
        """Count a request that cannot move and is about to be sent to the server of this address."""
        self._unmovable[server] += 1

    def let_go(self, server: str) -> None:
        """Count the end of such a request: the server has answered, or the request has failed."""
        self._unmovable[server] -= 1

    def give_up(self, server: str) -> None:
        """Count a request to the server of this address that its agent waits for no more."""
        self._given_up[server] += 1

    def cut_off(self, server: str) -> None:
        """Note that a client has found the server of this address dead."""
        self._dead.add(server)

    def servers(self) -> tuple[dict[str, int], dict[str, int], set[str]]:
        """Return `unmovable`, the number of requests that were given up, and the dead servers, by address."""
        return self.unmovable(), dict(self._given_up), self._dead

    def unmovable(self) -> dict[str, int]:
        """Return the number of requests in flight that cannot move, by address of their server."""
        return dict(+self._unmovable)


def start_collector() -> Any:
    """Start the run's collector in this job's Ray namespace; returns its handle, which the caller must keep alive. One
    that dies starts anew, without what it had: the run needs none of it."""
    restarts = {"max_restarts": -1, "max_task_retries": -1}
    return ray.remote(num_cpus=0)(SpanCollector).options(name=COLLECTOR, **restarts).remote()


class Stopwatch:
    """A start on the wall clock, and a duration that stays positive when a wall clock is set back."""

    def __init__(self) -> None:
        self.start = time.time()
        self._begin = time.monotonic()

    @property
    def now(self) -> float:
        """Return Unix seconds: the start plus the time that has passed since."""
        return self.start + time.monotonic() - self._begin


class Recorder:
    """A recorder of one process's spans, to the collector or to any other `sink`."""

    def __init__(self, sink: Callable[[Span], object]):
        self.add = sink

    def span(
        self, name: str, track: str, category: Category, **args: str | int | float
    ) -> AbstractContextManager[dict[str, Any]]:
        """Record the block as one span; entries put into the yielded dict become the span's args. A failing block is
        recorded too."""
        return self.span_since(Stopwatch(), name, track, category, **args)

    @contextmanager
    def span_since(
        self, watch: Stopwatch, name: str, track: str, category: Category, **args: str | int | float
    ) -> Iterator[dict[str, Any]]:
        """Record like `span`, from the moment at which `watch` began."""
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.add(Span(name, track, category, watch.start, watch.now, args))


def collector() -> Any:
    """Return the handle of this job's collector."""
    return ray.get_actor(COLLECTOR)


def remote_recorder() -> Recorder:
    """Return the recorder of a Ray worker process, which sends to this job's collector."""
    add, node = collector().add.remote, ray.get_runtime_context().get_node_id()
    return Recorder(lambda span: add(span, node))
