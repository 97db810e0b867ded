"""(d) Measures decoding while a model trains on the same device, in two processes like vLLM and verl's worker: how much
slower is a decode step, and how much is gained?

Decode steps of a few sequences (the tail of a rollout) are timed alone and beside forward and backward of the
same model, in turns. `gain` is the time of both one after the other over the time of both at once: above 1 the
update is worth streaming.
"""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl_fuse.errors import FuseError
from verl_fuse.runtime.transformer import Block
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named

TINY = Model("tiny", 2, 32, 4, 2, 8, 48, 50)
# Layers are cut so that weights, gradients and KV cache of both processes fit.
CASES: dict[str, tuple[str, int, int, int]] = {
    "cuda": ("qwen2.5-7b", 8, 4096, 8192),
    "cpu": ("qwen2.5-0.5b", 2, 128, 256),
}
SEQUENCES = {"cuda": (1, 8, 64), "cpu": (1, 8)}
ROUNDS, SECONDS = 3, 3.0


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    name, layers, context, tokens = ("tiny", 2, 16, 32) if tiny else CASES[device.type]
    model = TINY if tiny else model_named(name)
    seconds, rounds = (0.05, 1) if tiny else (SECONDS, ROUNDS)
    pairs = {}
    with _Worker(_train, device.type, model, layers, tokens) as training:
        for sequences in (1,) if tiny else SEQUENCES[device.type]:
            with _Worker(_decode, device.type, model, layers, context, sequences) as decoding:
                pairs[sequences] = _compared(decoding, training, seconds, rounds)
    return {"model": model.name, "layers": layers, "context": context, "trained tokens": tokens, "sequences": pairs}


class _Worker:
    """A process that makes steps for a given time on request, and reports the number of steps and their seconds."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "_Worker":
        self.result()  # the worker has built its model
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def start(self, seconds: float) -> None:
        self._connection.send(seconds)

    def result(self) -> tuple[int, float]:
        try:
            return self._connection.recv()
        except EOFError as error:
            self._process.join(5)
            raise FuseError(f"a process ended with exit code {self._process.exitcode}; its error is above") from error


def _compared(decoding: _Worker, training: _Worker, seconds: float, rounds: int) -> dict[str, float]:
    """Return medians over rounds of seconds per step, alone and beside the other."""
    found: dict[str, list[float]] = {"decode alone": [], "decode beside": [], "train alone": [], "train beside": []}
    for _ in range(rounds):
        for which, worker in (("decode", decoding), ("train", training)):
            worker.start(seconds)
            found[f"{which} alone"].append(_per_step(worker))
        for worker in (decoding, training):
            worker.start(seconds)
        found["decode beside"].append(_per_step(decoding))
        found["train beside"].append(_per_step(training))
    times = {name: statistics.median(each) for name, each in found.items()}
    slower = {which: times[f"{which} beside"] / times[f"{which} alone"] for which in ("decode", "train")}
    # One second of both at once does so much of each worker's own time.
    gain = sum(1 / each for each in slower.values())
    return {**times, "decode slower": slower["decode"], "train slower": slower["train"], "gain": gain}


def _per_step(worker: _Worker) -> float:
    steps, seconds = worker.result()
    return seconds / steps


def _serve(connection: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    step = work(*arguments)
    wait = torch.cuda.synchronize if arguments[0] == "cuda" else lambda: None
    for _ in range(2):
        step()
    wait()
    connection.send((0, 0.0))
    while True:
        try:
            seconds = connection.recv()
        except EOFError:
            return
        begun, steps = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            step()
            wait()
            steps += 1
        connection.send((steps, time.monotonic() - begun))


def _blocks(kind: str, model: Model, layers: int) -> nn.ModuleList:
    return nn.ModuleList(Block(model, 1) for _ in range(layers)).to(kind, _dtype(kind))


def _dtype(kind: str) -> torch.dtype:
    return torch.float32 if kind == "cpu" else torch.bfloat16


def _decode(kind: str, model: Model, layers: int, context: int, sequences: int) -> Any:
    """Return a step that takes one token of each sequence through all layers, the sequence's context cached."""
    blocks = _blocks(kind, model, layers)
    given = torch.randn(sequences, 1, model.hidden, device=kind, dtype=_dtype(kind))
    shape = (2, sequences, model.kv_heads, context, model.head_dim)
    caches = [torch.randn(shape, device=kind, dtype=_dtype(kind)) for _ in blocks]

    def step() -> None:
        with torch.inference_mode():
            x = given
            for block, cache in zip(blocks, caches, strict=True):
                x = block(x, cache)

    return step


def _train(kind: str, model: Model, layers: int, tokens: int) -> Any:
    """Return a step that runs forward and backward of one sequence of `tokens` tokens."""
    blocks = _blocks(kind, model, layers)
    given = torch.randn(1, tokens, model.hidden, device=kind, dtype=_dtype(kind))

    def step() -> None:
        x = given
        for block in blocks:
            x = block(x)
        x.float().pow(2).mean().backward()
        for parameter in blocks.parameters():
            parameter.grad = None

    return step
