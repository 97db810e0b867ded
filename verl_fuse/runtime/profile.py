"""Measures a device: peak matrix products and memory bandwidth, and the parts of a model over a grid of
batch sizes and lengths.

Each time is the median of repeated runs after a warm-up; on an accelerator the clock waits for it. Weights are random.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_fuse.cost.table import PARTS, MeasuredModel, Measurement, Part, Pass
from verl_fuse.errors import FuseError
from verl_fuse.runtime.transformer import Block, Head
from verl_fuse.spec.cluster import Device
from verl_fuse.spec.model import Model

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a measurement: at least `repeats` runs and `seconds` seconds of each case."""

    device: torch.device
    dtype: torch.dtype
    repeats: int = 5
    seconds: float = 0.05

    @classmethod
    def on(cls, device: str, precision: str) -> "BenchSettings":
        """Return settings for `device`, a name of torch; a FuseError if there is no such device."""
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise FuseError(f"device {device!r}: {error}") from error
        if precision not in PRECISIONS:
            raise FuseError(f"precision {precision!r}; allowed: {', '.join(PRECISIONS)}")
        return cls(torch.device(device), PRECISIONS[precision])

    def time(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a run."""
        run()
        times: list[float] = []
        while len(times) < self.repeats or sum(times) < self.seconds:
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


# A process that computes until its input ends, as it does with this process.
_BUSY = """
import os, sys, threading, torch
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
torch.set_num_threads({threads})
left, right = torch.rand(1024, 1024), torch.rand(1024, 1024)
print("busy", flush=True)
while True:
    left @ right
"""


@contextmanager
def busy(processes: int, threads: int) -> Iterator[None]:
    """Let so many other processes compute within the block, each with so many threads: ranks share the cores, caches
    and memory of a host."""
    command = [sys.executable, "-P", "-c", _BUSY.format(threads=threads)]
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            if process.stdout.readline() != b"busy\n":
                raise FuseError("a process that computes beside the measured one has ended; its error is above")
        yield


def measure_device(bench: BenchSettings) -> Device:
    """Return the device with its memory, reached matrix-product FLOP/s and reached copy bandwidth."""
    size = 1024 if bench.device.type == "cpu" else 8192
    left, right = bench.tensor(size, size), bench.tensor(size, size)
    flops = 2 * size**3 / bench.time(lambda: left @ right)
    source = bench.tensor(2**24 if bench.device.type == "cpu" else 2**28)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    bandwidth = moved / bench.time(lambda: target.copy_(source))
    if bench.device.type == "cpu":
        return Device("CPU", float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), flops, bandwidth)
    _, total = torch.cuda.mem_get_info(bench.device)
    return Device(torch.cuda.get_device_name(bench.device), float(total), flops, bandwidth)


def measure_model(
    bench: BenchSettings, model: Model, tp: int, batches: tuple[int, ...], lengths: tuple[int, ...]
) -> MeasuredModel:
    """Measure all parts and passes of one tensor rank's shard of the model."""
    modules = _Modules(bench, model, tp)
    measurements = tuple(
        Measurement(
            part,
            direction,
            batches,
            lengths,
            tuple(tuple(modules.seconds(part, direction, b, n) for n in lengths) for b in batches),
        )
        for part, direction in PARTS
    )
    return MeasuredModel(model, tp, _optimizer_rate(bench, modules.block), measurements)


class _Modules:
    """One block, head and embedding on the device, and the time of each of their passes."""

    def __init__(self, bench: BenchSettings, model: Model, tp: int):
        self.bench, self.model = bench, model
        self.block = Block(model, tp).to(bench.device, bench.dtype)
        self.head = Head(model, tp).to(bench.device, bench.dtype)
        rows = max(1, model.vocabulary // tp)
        self.embedding = torch.nn.Embedding(rows, model.hidden).to(bench.device, bench.dtype)

    def seconds(self, part: Part, direction: Pass, batch: int, length: int) -> float:
        """Return median seconds; a FuseError if the device's memory does not hold such a batch."""
        try:
            return self._seconds(part, direction, batch, length)
        except torch.OutOfMemoryError as error:
            raise FuseError(
                f"{part} {direction} of {self.model.name}: {batch} sequences of {length} tokens do not fit "
                f"{self.bench.device}; "
                "measure smaller batches or lengths"
            ) from error

    def _seconds(self, part: Part, direction: Pass, batch: int, length: int) -> float:
        model, bench = self.model, self.bench
        tokens = torch.randint(
            min(self.embedding.num_embeddings, self.head.width), (batch, length), device=bench.device
        )
        if part == "embedding":
            return self._forward(lambda: self.embedding(tokens))
        if direction == "decode":
            x = bench.tensor(batch, 1, model.hidden)
            if part == "head":
                return self._forward(lambda: self.head.draw(x))
            cache = bench.tensor(2, batch, self.block.kv_heads, length, self.block.head_dim)
            return self._forward(lambda: self.block(x, cache))
        x = bench.tensor(batch, length, model.hidden)
        run = (lambda: self.block(x)) if part == "block" else (lambda: self.head(x, tokens))
        return self._forward(run) if direction == "forward" else self._backward(run, x)

    def _forward(self, run: Callable[[], Tensor]) -> float:
        with torch.inference_mode():
            return self.bench.time(run)

    def _backward(self, run: Callable[[], Tensor], x: Tensor) -> float:
        """Return the seconds of the backward alone: its graph is kept and run again."""
        x.requires_grad_()
        out = run()
        gradient = torch.ones_like(out)
        parameters = [p for module in (self.block, self.head) for p in module.parameters()]

        def back() -> None:
            torch.autograd.backward(out, gradient, retain_graph=True)
            for parameter in (*parameters, x):
                parameter.grad = None

        return self.bench.time(back)


def _optimizer_rate(bench: BenchSettings, block: Block) -> float:
    """Return the elements per second of an AdamW step."""
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.0, fused=True)
    return sum(p.numel() for p in block.parameters()) / bench.time(optimizer.step)


def set_threads(threads: int) -> None:
    """Set the threads of torch in this process."""
    torch.set_num_threads(threads)
