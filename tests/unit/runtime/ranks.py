"""Real processes with gloo between them: start once, run many functions.

Processes are forked from a server that has torch loaded, so that a set of ranks costs a fraction of a second. Rank 0
hosts the store, as in verl.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.runtime.links import Link, open_links
from verl_fuse.runtime.watch import Watch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["verl_fuse.runtime.executor"])
CPU = torch.device("cpu")


@dataclass
class World:
    """The argument of a function on a rank: its rank and its connections."""

    rank: int
    size: int
    store: dist.TCPStore
    _links: dict[tuple, dict[int, Link]] = field(default_factory=dict)
    _groups: dict[tuple, Any] = field(default_factory=dict)
    _watches: dict[float, Watch] = field(default_factory=dict)

    def watch(self, timeout: float = 30.0) -> Watch:
        """Return the watch with this timeout, opened at the first call; the watch lives as long as the process."""
        if timeout not in self._watches:
            self._watches[timeout] = Watch(f"{timeout}", self.store, self.rank, range(self.size), timeout)
        return self._watches[timeout]

    def links(self, pipelines: Sequence[Sequence[int]]) -> dict[int, Link]:
        """Links of this placement, opened when it is first asked for (by all ranks)."""
        key = tuple(map(tuple, pipelines))
        if key not in self._links:
            self._links[key] = open_links(pipelines, CPU)
        return self._links[key]

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a process group, made at the first call (of all ranks)."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return self._groups[key]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one rank: its value, its error, or the end of its process."""

    value: Any = None
    error: str = ""
    stack: str = ""
    exit_code: int | None = None


class Ranks:
    """`size` processes; a context manager, which leaves none behind."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """Processes of ranks; the stderr of rank r goes to `folder`/r.txt, or nowhere."""
        pairs = [CONTEXT.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pairs]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(theirs, rank, size, folder and folder / f"{rank}.txt"), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        port = self._connections[0].recv()
        for connection in self._connections[1:]:
            connection.send(port)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid or 0

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin `function(world, *args)` on every rank."""
        for connection in self._connections:
            connection.send((function, args))

    def outcomes(self, seconds: float = 300.0) -> list[Outcome]:
        """Return the outcomes of the call, rank by rank; a rank that has not ended within `seconds` fails the test."""
        return [self.outcome(rank, seconds) for rank in range(len(self._processes))]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Values of `function(world, *args)` on every rank; an error on any rank fails the test."""
        self.start(function, *args)
        outcomes = self.outcomes()
        errors = [f"rank {rank}: {o.stack or o.exit_code}" for rank, o in enumerate(outcomes) if o.value is None]
        assert not errors, "\n".join(errors)
        return [outcome.value for outcome in outcomes]

    def outcome(self, rank: int, seconds: float) -> Outcome:
        """The outcome of one rank."""
        assert self._connections[rank].poll(seconds), f"rank {rank} has not ended within {seconds} s"
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return Outcome(exit_code=self._processes[rank].exitcode)


def _serve(connection: Connection, rank: int, size: int, errors: Path | None) -> None:
    os.dup2(os.open(errors or os.devnull, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        connection.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", connection.recv(), size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    world = World(rank, size, store)
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            outcome = Outcome(value=function(world, *args))
        except Exception as error:  # noqa: BLE001  the test looks at it
            outcome = Outcome(error=f"{type(error).__name__}: {error}", stack=traceback.format_exc())
        connection.send(outcome)
