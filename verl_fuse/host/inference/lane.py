"""A lane: one set of worker processes, one collective call at a time.

verl's colocated workers are async actors (engine_workers.py:728): two collective calls in flight may run in different
orders on different ranks and deadlock. Every collective call therefore goes through the lane of its workers, whose
single thread runs them in submission order.

Invariants (tests/unit/host/test_lane.py):
- calls never overlap and run in the order they were handed over;
- the first failure reaches the driver at the next `call`, `check` or `drain`, and no call queued after it runs;
- a call that outlasts the timeout is a FuseError naming lane and call;
- the holder of a call's future keeps its result; the lane keeps neither the result nor the work once the call has run;
- `close` ends the thread: the interpreter's exit cuts off a thread that outlives the run, which can crash the process.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Self, TypeVar

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Recorder
from verl_fuse.spec.timeline import Category

CLOSE_SECONDS = 5.0  # A hung call is left behind after that many seconds.

T = TypeVar("T")


class Lane:
    """A lane that runs calls on its own daemon thread (a hung collective must not keep the process alive); `timeout` is
    seconds per call."""

    def __init__(self, name: str, recorder: Recorder, timeout: float):
        self.name = name
        self._recorder = recorder
        self._timeout = timeout
        # Work, its future result, and its end: a submitter waits for the end alone, because a result may be large.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future, Future[None]] | None] = queue.SimpleQueue()
        self._submitted: list[tuple[str, Future]] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"verl-fuse lane {name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def queued(self) -> int:
        """Return the number of submitted calls that have not finished."""
        return sum(not future.done() for _, future in self._submitted)

    def submit(self, work: Callable[[], T], what: str) -> "Future[T]":
        """Hand over work to run after all work handed over before; return its future result."""
        self.check()
        self._submitted = [(name, future) for name, future in self._submitted if not future.done()]
        future, ended = self._enqueue(work)
        self._submitted.append((what, ended))
        return future

    def call(self, name: str, category: Category, work: Callable[[], T], **args: str | int | float) -> T:
        """Run one call after everything submitted before, record it as a span on this lane's track, and return its
        result."""
        self.drain()
        return self._result(name, self._enqueue(lambda: self.recorded(name, category, work, **args))[0])

    def recorded(self, name: str, category: Category, work: Callable[[], T], **args: str | int | float) -> T:
        """Run work as a span on this lane's track; for use inside submitted work."""
        with self._recorder.span(name, f"lane {self.name}", category, **args):
            return work()

    def drain(self) -> None:
        """Wait for all submitted work; raise its first failure."""
        submitted, self._submitted = self._submitted, []
        for what, future in submitted:
            self._result(what, future)
        self.check()

    def wait(self, future: "Future[T]", what: str) -> T:
        """Return the result of submitted work, once the work is done."""
        return self._result(what, future)

    def check(self) -> None:
        """Raise the failure of earlier work, if any."""
        if self._failure is not None:
            raise FuseError(f"lane {self.name!r}: a call on its workers failed: {self._failure}") from self._failure

    def close(self) -> None:
        """End the thread after the work handed over so far; no work may be handed over afterwards."""
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _enqueue(self, work: Callable[[], Any]) -> "tuple[Future, Future[None]]":
        future: Future = Future()
        ended: Future[None] = Future()
        self._calls.put((work, future, ended))
        return future, ended

    def _result(self, what: str, future: Future) -> Any:
        try:
            return future.result(self._timeout)
        except FutureTimeout:
            if future.done():
                raise
            raise FuseError(
                f"lane {self.name!r}: {what!r} did not finish in {self._timeout:g} s; its workers still hold it "
                "(fuse.call_timeout)"
            ) from None

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._run_one(*item)
            # The thread waits here for the next call.
            del item

    def _run_one(self, work: Callable[[], Any], future: Future, ended: "Future[None]") -> None:
        try:
            if self._failure is not None:
                raise FuseError(f"lane {self.name!r}: not run, an earlier call failed: {self._failure}")
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, and kept for `check`
            self._failure = self._failure or error
            ended.set_exception(error)
            future.set_exception(error)
        else:
            ended.set_result(None)
            future.set_result(result)
