"""Compare a fused actor–critic pipeline with serial training by Megatron's own 1F1B, on four processes with emulated
stage times (sleeps).

A case "4,2x2,8" is an actor of 4 stages and two copies of a critic of 2 stages, 8 micro-batches of each model per
mini-batch. A stage of the actor takes 50 ms forward and 100 ms backward; a stage of a 2-stage critic holds twice the
layers and takes twice as long. Serial is stock training: all mini-batches of the critic, then all of the actor. Seconds
are medians of `REPEATS` runs in turns; `bitwise` tells that losses and weights after two mini-batches, with an SGD step
after each, are equal in every run.
"""

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration" / "support"))
from ranks import CPU, Ranks, World
from small_gpt import MESSAGE, forward_backward, open_view, replica, step, tokens

from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.lower import lower
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule, parse_text
from verl_fuse_pipeline.megatron.stage import ForwardBackwardCall, MegatronStage

RANKS = 4
FORWARD, BACKWARD = 0.05, 0.1
MINI_BATCHES = 2
REPEATS = 3
LEARNING_RATE = 0.1
# Critic stages, copies of the critic, micro-batches of each model per mini-batch.
CASES = {"4,4,8": (4, 1, 8), "4,4,4": (4, 1, 4), "4,2x2,8": (2, 2, 8)}


def problem(stages: int, copies: int, microbatches: int) -> ScheduleProblem:
    """Return the problem in which the critic's copies lie side by side, their stages in reverse order; activations
    count in layers."""
    times = RANKS / stages
    critics = [
        Pipeline(
            "critic",
            range((k + 1) * stages - 1, k * stages - 1, -1),
            microbatches // copies,
            FORWARD * times,
            BACKWARD * times,
            times,
        )
        for k in range(copies)
    ]
    return ScheduleProblem(RANKS, (Pipeline("actor", range(RANKS), microbatches, FORWARD, BACKWARD, 1), *critics))


class Slow(torch.autograd.Function):
    """A stage that computes the identity, slowed down to the time of a stage."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        context.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.seconds)
        return gradient, None, None


class Trained:
    """One stage of one pipeline on this rank: a Megatron model, its data and its SGD."""

    def __init__(self, view: Any, pipeline: Pipeline, index: int) -> None:
        self.view = view
        self.model: Any = replica(view, index > 0)
        self.losses: list[Any] = []
        self._pipeline = pipeline
        self._index = index
        self._seconds = pipeline.forward[0], pipeline.backward[0]

    def step(self, data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run Megatron's forward step, slowed down to the forward time of the stage."""
        forward, backward = self._seconds
        ends = time.monotonic() + forward
        output, reduced = step(data, model)
        return Slow.apply(output, max(0.0, ends - time.monotonic()), backward), reduced

    def data(self, mini_batch: int) -> list[torch.Tensor]:
        count = self._pipeline.microbatches
        return [tokens(self._index, mini_batch * count + m) for m in range(count)]

    def pipeline_stage(self, mini_batch: int) -> MegatronStage:
        data = self.data(mini_batch)
        call = ForwardBackwardCall(self.step, iter(data), [self.model], len(data))
        return MegatronStage(self.view, call, [MESSAGE] * len(data), CPU)

    def update(self, losses: list[Any]) -> None:
        """Make one SGD step on the accumulated gradients."""
        self.losses += losses
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= LEARNING_RATE * weight.main_grad
        self.model.zero_grad_buffer()

    @property
    def digest(self) -> str:
        """Return a digest of losses and weights."""
        weights = b"".join(weight.detach().numpy().tobytes() for weight in self.model.parameters())
        return hashlib.sha256(repr(self.losses).encode() + weights).hexdigest()


def train(world: World, whole: ScheduleProblem, orders: str | None) -> tuple[float, list[str]]:
    """Train all mini-batches of both models, fused in the given orders or, without orders, with Megatron's 1F1B; return
    the seconds, and a digest per model."""
    views = {p.model: open_view(p.model, p.model == "critic", 1, p.stages) for p in whole.pipelines}
    links = world.links([p.ranks for p in whole.pipelines])
    trained = {i: Trained(views[whole.pipelines[i].model], whole.pipelines[i], i) for i in links}
    executor = Executor(lower(whole, parse_text(orders)), world.rank, links, world.watch()) if orders else None
    dist.barrier()
    begun = time.monotonic()
    if executor:
        for mini_batch in range(MINI_BATCHES):
            stages = {i: stage.pipeline_stage(mini_batch) for i, stage in trained.items()}
            executor.run(stages)
            for i, stage in trained.items():
                stage.update(stages[i].results)
        dist.barrier()
    else:
        for stage in reversed(trained.values()):  # the critic first
            for mini_batch in range(MINI_BATCHES):
                stage.update(forward_backward(stage.view, stage.model, stage.step, stage.data(mini_batch)))
            dist.barrier()
    return time.monotonic() - begun, [stage.digest for stage in trained.values()]


def measured(case: str) -> dict[str, Any]:
    whole = problem(*CASES[case])
    fused: Schedule = solve(whole, "portfolio", Budget(20.0))
    seconds: dict[str, list[float]] = {"serial": [], "fused": []}
    digests = []
    with Ranks(RANKS) as ranks:
        for _ in range(REPEATS):
            for name, orders in (("serial", None), ("fused", fused.to_text())):
                outcomes = ranks.call(train, whole, orders)
                seconds[name].append(max(outcome[0] for outcome in outcomes))
                digests.append([outcome[1] for outcome in outcomes])
    serial_seconds, fused_seconds = (statistics.median(seconds[name]) for name in ("serial", "fused"))
    return {
        "case": case,
        "serial_seconds": round(serial_seconds, 3),
        "fused_seconds": round(fused_seconds, 3),
        "simulated_seconds": round(MINI_BATCHES * fused.makespan, 3),
        "lower_bound_seconds": round(MINI_BATCHES * fused.lower_bound, 3),
        "ratio": round(serial_seconds / fused_seconds, 3),
        "bitwise": all(digest == digests[0] for digest in digests),
    }


def main() -> None:
    print(json.dumps({"bench": "pipeline", "cases": [measured(case) for case in CASES]}))


if __name__ == "__main__":
    main()
