"""Ends a faulty program on every rank, with the same culprit named.

Every rank writes its occupation into a store. A rank that waits looks there for a verdict; when its time is up it
follows the chain of waiting ranks to the rank that does not wait. The first verdict written stands for all.

Invariants (tests/unit/runtime/test_watch.py, test_faults.py):
- no wait lasts longer than the timeout, and a wait ends within STORE_POLL_SECONDS of a verdict;
- every rank's error carries the same verdict, which names ranks, ops and seconds;
- a rank that cannot end by itself is ended by its guard, with the stacks of its threads on stderr;
- keys of past programs are removed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.blame import RankState, Verdict, blame
from verl_fuse.runtime.guard import SILENCE_SECONDS, Guard
from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.store import Store

T = TypeVar("T")

# Seconds between two looks of a waiting rank for a verdict, and the least seconds between two looks into the store for
# its value.
STORE_POLL_SECONDS = 0.2
LOOK_SECONDS = 0.001


class Stopped(FuseError):
    """A program that ended by a verdict."""


class Watch:
    """One rank's part in a group of ranks that run programs together; all of them open it under the
    same `name`, and close it.

    `store` reaches all `ranks` (global) and outlives the programs. `timeout` (seconds) bounds every wait. `what` is the
    name of a program in errors.
    """

    def __init__(
        self, name: str, store: Store, rank: int, ranks: Sequence[int], timeout: float, what: str = "pipeline program"
    ) -> None:
        if timeout <= 0 or rank not in ranks:
            raise FuseError(
                f"watch {name!r}: timeout={timeout!r}, rank={rank}, ranks={list(ranks)}; needs > 0, and a member"
            )
        self.rank = rank
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self._prefix = f"verl_fuse/{name}"
        self._what = what
        self._store = store
        self._program = 0
        self._opened = time.time()
        self.runs("what comes before the first program")
        if self._ask(store.add, f"{self._prefix}/opened/{rank}", 1) > 1:
            raise FuseError(f"watch {name!r} has been opened on rank {rank} before; needs a name of its own")
        self._guard = Guard(store, f"{self._prefix}/pulse/{rank}", f"{self._prefix}/verdict", rank, timeout)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch's thread; no rank hears a pulse of this rank any more."""
        self._guard.close()

    @contextmanager
    def program(self) -> Iterator[None]:
        """Run one program in the block; an exception on one rank becomes the verdict of all ranks. After a verdict no
        program runs."""
        self._program += 1
        self._guard.running(True)
        try:
            self.runs("the start of the program")
            self._look()
            yield
            self.runs(f"what follows program {self._program}")
        except Stopped:
            raise
        except LostPeer as lost:
            # A message begun with a peer may break while this rank works on something else.
            raise self._lost(lost) from lost
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            with suppress(Stopped):
                self.stop(Verdict((self.rank,), f"rank {self.rank} failed at {self._doing.what}: {what}"))
            raise
        finally:
            self._guard.running(False)

    def runs(self, what: str) -> None:
        """Announce that this rank works on `what`."""
        self._say(RankState("runs", what, time.time(), self._program))

    def wait(self, what: str, peers: Sequence[int], poll: Callable[[float], T | None]) -> T:
        """Return the result of `poll(seconds)`, as soon as it is not None; Stopped by a verdict, a lost
        peer, or after the timeout."""
        try:
            if (found := poll(0.0)) is not None:
                return found
            self._say(RankState("waits", what, time.time(), self._program, tuple(peers)))
            begun, pulses = time.monotonic(), None
            while (left := begun + self.timeout - time.monotonic()) > 0:
                if (found := poll(min(left, STORE_POLL_SECONDS))) is not None:
                    return found
                self._look()
                if pulses is None and left < SILENCE_SECONDS + STORE_POLL_SECONDS:
                    pulses = self._pulses()
        except LostPeer as lost:
            raise self._lost(lost) from lost
        silent = [rank for rank, pulse in self._pulses().items() if pulses and pulse == pulses[rank]]
        raise self.stop(blame(self._states(), silent if self.timeout > SILENCE_SECONDS else [], self.rank, time.time()))

    def gather(self, topic: str, value: str) -> dict[int, str]:
        """Return the values that ranks give under `topic`; each program may use a topic once."""
        self._ask(self._store.set, self._topic(topic, self.rank, self._program), value)
        keys = [self._topic(topic, rank, self._program) for rank in self.ranks]
        self.wait(topic, [rank for rank in self.ranks if rank != self.rank], lambda seconds: self._all(keys, seconds))
        values = self._ask(self._store.multi_get, keys)
        return {rank: value.decode() for rank, value in zip(self.ranks, values, strict=True)}

    def stop(self, verdict: Verdict) -> Stopped:
        """Return the error to raise: the verdict that stands, which is `verdict` if there was none."""
        standing = self._ask(self._store.compare_set, f"{self._prefix}/verdict", "", verdict.to_json())
        return self._stopped(Verdict.from_json(standing))

    def forget(self, *topics: str) -> None:
        """Remove this rank's keys of the program before; every rank must have begun this one."""
        for topic in topics:
            self._ask(self._store.delete_key, self._topic(topic, self.rank, self._program - 1))

    def _all(self, keys: list[str], seconds: float) -> bool | None:
        begun = time.monotonic()
        while not self._ask(self._store.check, keys):
            waited = time.monotonic() - begun
            if waited >= seconds:
                return None
            # The rank looks less and less often, so that many waiting ranks leave the store to the ranks that are late.
            time.sleep(max(LOOK_SECONDS, waited / 10))
        return True

    def _say(self, state: RankState) -> None:
        self._doing = state
        self._ask(self._store.set, f"{self._prefix}/state/{self.rank}", state.to_json())

    def _states(self) -> dict[int, RankState]:
        """Return the state of every rank; a rank that has not opened its watch is in program -1."""
        texts = {rank: self._value(f"{self._prefix}/state/{rank}") for rank in self.ranks}
        absent = RankState("runs", "what comes before its watch is opened", self._opened, -1)
        return {rank: absent if text is None else RankState.from_json(text) for rank, text in texts.items()}

    def _pulses(self) -> dict[int, bytes | None]:
        return {rank: self._value(f"{self._prefix}/pulse/{rank}") for rank in self.ranks if rank != self.rank}

    def _value(self, key: str) -> bytes | None:
        return self._ask(self._store.get, key) if self._ask(self._store.check, [key]) else None

    def _look(self) -> None:
        verdict = self._value(f"{self._prefix}/verdict")
        if verdict is not None:
            raise self._stopped(Verdict.from_json(verdict))

    def _lost(self, lost: LostPeer) -> Stopped:
        text = f"rank {lost.peer} closed its connection to rank {self.rank}"
        try:
            state = self._states()[lost.peer]
            return self.stop(Verdict((lost.peer,), f"{text}; it {state.told(time.time())}"))
        except Stopped as gone:  # The rank hosted the store as well.
            return Stopped(f"{text}; {gone}")

    def _stopped(self, verdict: Verdict) -> Stopped:
        here = f"{'waiting for' if self._doing.phase == 'waits' else 'at'} {self._doing.what}"
        return Stopped(f"{self._what} stopped: {verdict.text} (this is rank {self.rank}, {here})")

    def _topic(self, topic: str, rank: int, program: int) -> str:
        return f"{self._prefix}/{program}/{topic}/{rank}"

    def _ask(self, operation: Callable[..., T], *args: object) -> T:
        try:
            return operation(*args)
        except dist.DistError as error:
            raise Stopped(
                f"{self._what} stopped: the store is gone, so the process that hosts it has ended; "
                f"this is rank {self.rank}, at {self._doing.what}: {error}"
            ) from error
