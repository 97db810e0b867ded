"""Times the begin and end of ops: on the host's clock, or on the device's where ops run behind the host."""

import time

import torch


def clock_for(device: torch.device) -> "HostClock | CudaClock":
    """Return a clock with marks in time, which are read when everything marked is over."""
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    """A clock of monotonic seconds on top of the wall clock at the start, so that a clock set back makes no negative
    times."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._marks: list[float] = []

    def mark(self) -> int:
        """Mark this moment."""
        self._marks.append(time.monotonic())
        return len(self._marks) - 1

    def read(self) -> list[float]:
        """Return the Unix seconds of every mark."""
        return [self._offset + mark for mark in self._marks]


class CudaClock:
    """A clock of events on the current stream, counted from the wall clock at the start, when the stream is idle."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._start = time.time()
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> int:
        """Mark this moment of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        return len(self._events) - 1

    def read(self) -> list[float]:
        """Return the Unix seconds of every mark; wait until the device has reached the last one."""
        self._events[-1].synchronize()
        return [self._start + self._events[0].elapsed_time(event) / 1000 for event in self._events]
