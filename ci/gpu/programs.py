"""Run the programs of the kit on ranks: a fused program of two models, and transfers of weights between layouts, each
compared bitwise with the right result."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ci.gpu.autograd import AutogradStage
from ci.gpu.processes import Rank
from verl_fuse.reshard.program import plan_transfer
from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.links import open_links
from verl_fuse.runtime.lower import lower_schedule
from verl_fuse.runtime.reshard.port import open_port
from verl_fuse.runtime.reshard.transfer import Transfer
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse.runtime.watch import Watch
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "runtime"))
from transfers import QWEN2, content, different, placed, tensors_of  # pyright: ignore[reportMissingImports]

SECONDS = 60.0
REPEATS = 3
ROWS = 64


def checked(rank: Rank, backend: str, width: int, moves: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Run a fused program, and then transfers between these pairs of layouts; return the results by name."""
    found = {"program": fused(rank, width)}
    return found | {f"{source} to {target}": transferred(rank, backend, source, target) for source, target in moves}


def different_ranks(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the names in ranks' `checked` of values that are not bitwise right."""
    return [
        f"{name}, rank {rank}: not bitwise equal"
        for rank, each in enumerate(found)
        for name, result in each.items()
        if result.get("wrong") or not result.get("bitwise", True)
    ]


def fused_problem(ranks: int) -> ScheduleProblem:
    """Return the problem of an actor through all ranks and a critic back, two micro-batches a rank."""
    order = tuple(range(ranks))
    count = 2 * ranks
    return ScheduleProblem(
        ranks, (Pipeline("actor", order, count, 1, 2, 1), Pipeline("critic", order[::-1], count, 1, 2, 1))
    )


def fused(rank: Rank, width: int) -> dict[str, Any]:
    """Return the program's seconds, and whether its gradients equal the gradients of the same stages run one after the
    other on this rank's own device."""
    problem = fused_problem(rank.size)
    schedule = solve(problem, "greedy", Budget(30.0))
    links = open_links([pipeline.ranks for pipeline in problem.pipelines], rank.device)
    wanted = _serial(problem, width, rank)
    seconds, equal = [], True
    store: Any = PrefixStore("watch program", rank.store)
    with Watch("kit", store, rank.number, range(rank.size), SECONDS) as watch:
        executor = Executor(lower_schedule(schedule), rank.number, links, watch)
        for _ in range(REPEATS):
            weights = {
                index: _weight(index, p.ranks.index(rank.number), width, rank) for index, p in _mine(problem, rank)
            }
            stages = {index: _stage(problem, index, rank, weight, width) for index, weight in weights.items()}
            begun = time.monotonic()
            executor.run(stages)
            _wait(rank.device)
            seconds.append(time.monotonic() - begun)
            equal &= all(_same(weight.grad, wanted[index]) for index, weight in weights.items())
    return {"seconds": min(seconds), "bitwise": bool(equal), "backend": links[0].ports["F"].backend}


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _mine(problem: ScheduleProblem, rank: Rank) -> list[tuple[int, Pipeline]]:
    return [(index, p) for index, p in enumerate(problem.pipelines) if rank.number in p.ranks]


def _weight(pipeline: int, stage: int, width: int, rank: Rank) -> torch.nn.Parameter:
    draw = torch.Generator().manual_seed(100 * pipeline + stage)
    return torch.nn.Parameter((torch.randn(width, width, generator=draw) / width**0.5).to(rank.device))


def _data(pipeline: int, microbatch: int, width: int, rank: Rank) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10_000 + 100 * pipeline + microbatch)
    return torch.randn(ROWS, width, generator=draw).to(rank.device)


def _forward(x: torch.Tensor, weight: torch.Tensor, *, last: bool) -> torch.Tensor:
    y = torch.tanh(x @ weight)
    return y.pow(2).mean() if last else y


def _stage(problem: ScheduleProblem, index: int, rank: Rank, weight: torch.Tensor, width: int) -> AutogradStage:
    pipeline = problem.pipelines[index]
    stage, last = pipeline.ranks.index(rank.number), pipeline.stages - 1
    specs = [TensorSpec((ROWS, width), torch.float32)] * pipeline.microbatches

    def run(microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        x = _data(index, microbatch, width, rank) if received is None else received
        return _forward(x, weight, last=stage == last)

    return AutogradStage(run, [weight], specs if stage else None, None if stage == last else specs)


def _serial(problem: ScheduleProblem, width: int, rank: Rank) -> dict[int, torch.Tensor]:
    """Return, by pipeline, the gradient of this rank's stage when nothing is distributed."""
    found = {}
    for index, pipeline in _mine(problem, rank):
        weights = [_weight(index, stage, width, rank) for stage in range(pipeline.stages)]
        for microbatch in range(pipeline.microbatches):
            x = _data(index, microbatch, width, rank)
            for stage, weight in enumerate(weights):
                x = _forward(x, weight, last=stage == pipeline.stages - 1)
            x.backward()
        gradient = weights[pipeline.ranks.index(rank.number)].grad
        assert gradient is not None
        found[index] = gradient
    return found


def transferred(rank: Rank, backend: str, source: str, target: str) -> dict[str, Any]:
    """Transfer three versions of a model from one layout to another, and compare each with the target layout's own
    tensors."""
    have, want = placed(source, QWEN2), placed(target, QWEN2)
    program = plan_transfer(QWEN2, have, want, nodes=[0] * rank.size, item_bytes=4, bucket_bytes=1 << 18)
    name = f"{source} to {target}"
    port = open_port(PrefixStore(f"port {name}", rank.store), rank.number, rank.size, backend)
    seconds, wrong = [], []
    store: Any = PrefixStore("watch", rank.store)
    with Watch(name, store, rank.number, range(rank.size), SECONDS, "transfer") as watch:
        move = Transfer(program, rank.number, port, watch, dtype=torch.float32, device=rank.device, checksums=True)
        for version in range(REPEATS):
            whole = content(QWEN2, version)
            given, expected, empty = (
                {key: tensor.to(rank.device) for key, tensor in tensors_of(side, QWEN2, rank.number, what).items()}
                for side, what in ((have, whole), (want, whole), (want, None))
            )
            report = move.run(given, empty, version)
            seconds.append(report.seconds)
            wrong += different(empty, expected)
    port.close()
    return {"seconds": min(seconds), "received bytes": report.received_bytes, "wrong": wrong}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
