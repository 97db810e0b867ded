"""Devices with one hardware queue, and NCCL on them, in one process: what CUDA_DEVICE_MAX_CONNECTIONS=1 makes
of a program's launches.

A device takes launches in their order. One starts when what was launched before it on its stream is over, and
until then nothing behind it starts. A message needs both of its ends started; each pair of ranks in a group has a
stream, all ops share one. Where
a stage has several ranks (tensor parallelism), an op is a collective of theirs: it needs all of them started.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from verl_fuse.runtime import row
from verl_fuse.runtime.links import Link
from verl_fuse.runtime.lower import lower
from verl_fuse.runtime.nccl import NcclPort
from verl_fuse.runtime.row import RowExecution
from verl_fuse.runtime.stage import TensorSpec

SPEC = TensorSpec((1,), torch.float32)
OPS = "ops"


class Hang(Exception):
    """No rank and no device can go on."""


@dataclass(eq=False)
class Launch:
    """On `stream`; an end of the message or op `key`. It starts after `after` are over."""

    stream: object
    key: object
    after: "list[Launch]" = field(default_factory=list)
    started: bool = False
    over: bool = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over


class Device:
    """One rank's."""

    def __init__(self) -> None:
        self._queue: deque[Launch] = deque()
        self._last: dict[object, Launch] = {}

    def launch(self, stream: object, key: object, after: tuple[Launch | None, ...] = ()) -> Launch:
        before = [found for found in (self._last.get(stream), *after) if found is not None]
        launched = self._last[stream] = Launch(stream, key, before)
        self._queue.append(launched)
        return launched

    def last(self, stream: object) -> Launch | None:
        return self._last.get(stream)

    def start(self) -> list[Launch]:
        """Start the work at the head of the queue that can start."""
        started = []
        while self._queue and all(before.over for before in self._queue[0].after):
            started.append(self._queue.popleft())
            started[-1].started = True
        return started


class Machine:
    """All ranks' devices, and the groups of NCCL on them: the rank that calls is the greenlet's."""

    def __init__(self, ranks: int, width: int) -> None:
        self.devices = [Device() for _ in range(ranks)]
        self._width = width
        self._posted: dict[Any, int] = defaultdict(int)
        self._ends: dict[Any, list[Launch]] = defaultdict(list)

    def op(self) -> None:
        """One of this rank's ops; the other ranks of its stage have the same ones in the same order."""
        rank = getcurrent().rank
        key = (OPS, rank // self._width, self._posted[OPS, rank])
        self._posted[OPS, rank] += 1
        self._ends[key].append(self.devices[rank].launch(OPS, key))

    def end(self, way: str, group: Any, source: int, target: int) -> Launch:
        """One end of a message."""
        place = (way, group, source, target)
        key = (group, source, target, self._posted[place])
        self._posted[place] += 1
        device = self.devices[getcurrent().rank]
        # NCCL's stream waits for what the current stream holds.
        launched = device.launch((group, source, target), key, (device.last(OPS),))
        self._ends[key].append(launched)
        return launched

    def tick(self) -> bool:
        """Let devices go on; whether any did."""
        moved = False
        for device in self.devices:
            moved |= bool(device.start())
        for key in [key for key, ends in self._ends.items() if self._whole(key) and all(end.started for end in ends)]:
            for end in self._ends.pop(key):
                end.over = moved = True
        return moved

    def _whole(self, key: Any) -> bool:
        return len(self._ends[key]) == (self._width if key[0] == OPS else 2)


@dataclass(frozen=True)
class Group:
    """A process group of all ranks."""

    machine: Machine
    name: object

    def send(self, messages: list[torch.Tensor], target: int, tag: int) -> Launch:
        return self.machine.end("send", self.name, getcurrent().rank, target)

    def recv(self, messages: list[torch.Tensor], source: int, tag: int) -> Launch:
        return self.machine.end("receive", self.name, source, getcurrent().rank)


class IdleStage:
    """Launches its ops and computes nothing."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine, first: bool, last: bool) -> None:
        self._machine, self._first, self._last = machine, first, last

    def message(self, microbatch: int) -> TensorSpec:
        return SPEC

    result = message

    def weights(self) -> list[torch.Tensor]:
        return []

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        self._machine.op()
        return None if self._last else torch.empty(SPEC.shape)

    def before_last_backward(self) -> None:
        """Nothing is synchronised."""

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        self._machine.op()
        return None if self._first else torch.empty(SPEC.shape)


class QueueWatch:
    """A rank that waits lets the others go on."""

    def __init__(self, rank: int, scheduler: greenlet) -> None:
        self.rank, self._scheduler = rank, scheduler

    def runs(self, what: str) -> None:
        self._scheduler.switch(True)

    def wait(self, what: str, peers: Any, poll: Any) -> Any:
        while (found := poll(0.0)) is None:
            self._scheduler.switch(False)
        return found


def run(problem: Any, orders: Any, depth: int, draw: random.Random, monkeypatch: Any, width: int = 1) -> None:
    """The rows of a program on a machine with `width` devices for each rank of the problem, in random turns; Hang where
    it does not end."""
    ranks = width * problem.ranks
    program, machine, scheduler = lower(problem, orders), Machine(ranks, width), getcurrent()
    monkeypatch.setattr(row, "clock_for", lambda device: SimpleNamespace(mark=lambda: 0, read=lambda: [0.0]))

    def link(index: int, row: int, lane: int) -> Link:
        stages = problem.pipelines[index].ranks
        ports: Any = {kind: NcclPort(Group(machine, (index, lane, kind)), range(ranks)) for kind in "FB"}
        return Link(tuple(width * rank + lane for rank in stages), stages.index(row), ports)

    def play(rank: int) -> None:
        row, lane = divmod(rank, width)
        links = {index: link(index, row, lane) for index, p in enumerate(problem.pipelines) if row in p.ranks}
        stages = {
            index: IdleStage(machine, link.stage == 0, link.stage == len(link.ranks) - 1)
            for index, link in links.items()
        }
        RowExecution(program, row, links, stages, QueueWatch(rank, scheduler), depth).run()  # type: ignore[arg-type]

    running = []
    for rank in range(ranks):
        playing = greenlet(play)
        playing.rank = rank
        running.append(playing)
    moved = {rank: playing.switch(rank) for rank, playing in enumerate(running)}
    while any(not playing.dead for playing in running):
        live = [rank for rank, playing in enumerate(running) if not playing.dead]
        draw.shuffle(live)
        for rank in live:
            moved[rank] = running[rank].switch()
        # A rank that ends counts as one that went on.
        if not machine.tick() and not any(moved[rank] or running[rank].dead for rank in live):
            raise Hang(f"ranks {sorted(live)} wait for messages that cannot start")
