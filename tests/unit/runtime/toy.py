"""Small models cut into stages, and the results of serial training of the same stages."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ci.gpu.autograd import AutogradStage
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

Orders = list[list[tuple[int, str, int]]]

# Ranks of pipelines in stage order: reversed critics, copies, short and crooked ones.
PLACEMENTS = (
    (("actor", (0, 1, 2, 3)), ("critic", (3, 2, 1, 0))),
    (("actor", (0, 1, 2, 3)), ("critic", (1, 0)), ("critic", (3, 2))),
    (("actor", (0, 1)), ("actor", (2, 3)), ("critic", (3, 2, 1, 0))),
    (("actor", (0, 1, 2)), ("critic", (2, 0))),
    (("actor", (2, 0, 3, 1)), ("critic", (1,)), ("critic", (3,))),
    (("actor", (0, 1)), ("critic", (1, 0))),
)


def random_problem(draw: random.Random) -> ScheduleProblem:
    placement = draw.choice(PLACEMENTS)
    counts = {model: draw.randint(1, 5) for model, _ in placement}
    return ScheduleProblem(4, tuple(Pipeline(model, ranks, counts[model], 1, 2, 1) for model, ranks in placement))


def random_orders(problem: ScheduleProblem, draw: random.Random) -> Orders:
    """Any orders that run: pick, again and again, a random rank and a random op whose input is there."""
    rows: Orders = [[] for _ in range(problem.ranks)]
    done: set[tuple[int, int, str, int]] = set()
    following = {(i, s, kind): 0 for i, p in enumerate(problem.pipelines) for s in range(p.stages) for kind in "FB"}
    while following:
        i, s, kind = draw.choice(sorted(following))
        m, last = following[i, s, kind], problem.pipelines[i].stages - 1
        if kind == "F":
            needed = (i, s - 1, "F", m) if s else None
        else:
            needed = (i, s + 1, "B", m) if s < last else (i, s, "F", m)
        if (needed is None or needed in done) and (kind == "F" or (i, s, "F", m) in done):
            rows[problem.pipelines[i].ranks[s]].append((i, kind, m))
            done.add((i, s, kind, m))
            following[i, s, kind] += 1
            if m + 1 == problem.pipelines[i].microbatches:
                del following[i, s, kind]
    return rows


@dataclass(frozen=True)
class Toy:
    """Layers and data of every pipeline, the same in every process: widths differ by stage,
    sample counts by micro-batch."""

    problem: ScheduleProblem
    seed: int
    reads: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(pipeline, micro-batch) -> micro-batch whose data it gets instead of its own."""

    def width(self, pipeline: int, stage: int) -> int:
        """Return the width of the stage's input; the copies of a model are alike."""
        return 3 + (7 * stage + len(self.problem.pipelines[pipeline].model)) % 5

    def weight(self, pipeline: int, stage: int) -> torch.nn.Parameter:
        model = self.problem.pipelines[pipeline].model
        draw = torch.Generator().manual_seed(1000 * self.seed + 10 * stage + len(model))
        shape = self.width(pipeline, stage), self.width(pipeline, stage + 1)
        return torch.nn.Parameter(torch.randn(shape, generator=draw))

    def shape(self, pipeline: int, stage: int, microbatch: int) -> tuple[int, int]:
        """Of what enters the stage; every third micro-batch is of one size."""
        return 2 + self.reads.get((pipeline, microbatch), microbatch) % 3, self.width(pipeline, stage)

    def data(self, pipeline: int, microbatch: int) -> torch.Tensor:
        source = self.reads.get((pipeline, microbatch), microbatch)
        draw = torch.Generator().manual_seed(1000 * self.seed + 100 * pipeline + source)
        return torch.randn(self.shape(pipeline, 0, microbatch), generator=draw)

    def run_stage(
        self, pipeline: int, stage: int, weight: torch.Tensor, m: int, x: torch.Tensor | None
    ) -> torch.Tensor:
        """One stage of one micro-batch; the last stage's result is a loss."""
        y = torch.tanh((self.data(pipeline, m) if x is None else x) @ weight)
        p = self.problem.pipelines[pipeline]
        return y if stage + 1 < p.stages else (y**2).mean() / p.microbatches

    def specs(self, pipeline: int, stage: int) -> list[TensorSpec]:
        """Of what enters the stage."""
        count = self.problem.pipelines[pipeline].microbatches
        return [TensorSpec(self.shape(pipeline, stage, m), torch.float32) for m in range(count)]

    def serial(self) -> tuple[dict[tuple[int, int], torch.Tensor], dict[tuple[int, int], torch.Tensor]]:
        """Gradients by (pipeline, stage), added up over the copies of a model, and losses by
        (pipeline, micro-batch)."""
        gradients, losses = {}, {}
        for i, p in enumerate(self.problem.pipelines):
            weights = [self.weight(i, s) for s in range(p.stages)]
            for m in range(p.microbatches):
                x = None
                for s, weight in enumerate(weights):
                    x = self.run_stage(i, s, weight, m, x)
                assert x is not None
                losses[i, m] = x.detach()
                x.backward()
            gradients |= {(i, s): weight.grad for s, weight in enumerate(weights)}
        models = [p.model for p in self.problem.pipelines]
        total = {}
        for i, s in gradients:
            copies = [gradients[j, s] for j, model in enumerate(models) if model == models[i]]
            total[i, s] = sum(copies[1:], start=copies[0])
        return total, losses

    def copies(self, pipeline: int, stage: int) -> list[int]:
        """Ranks that hold this stage of the same model."""
        model = self.problem.pipelines[pipeline].model
        return [p.ranks[stage] for p in self.problem.pipelines if p.model == model]


class ToyStage(AutogradStage):
    """A toy stage that takes a random while per op, and notes what the executor calls."""

    def __init__(self, toy: Toy, pipeline: int, rank: int, group=None, delays: Sequence[float] = (0.0,)) -> None:
        p = toy.problem.pipelines[pipeline]
        stage = p.ranks.index(rank)
        self.weight = toy.weight(pipeline, stage)
        self.calls: list[str] = []
        self._delay = random.Random(rank)
        self._delays = delays
        self._group = group
        super().__init__(
            lambda m, x: toy.run_stage(pipeline, stage, self.weight, m, x),
            [self.weight],
            toy.specs(pipeline, stage) if stage else None,
            toy.specs(pipeline, stage + 1) if stage + 1 < p.stages else None,
        )

    def begin(self) -> None:
        self.calls.append("begin")

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        self.calls.append(f"F{microbatch}")
        time.sleep(self._delay.choice(self._delays))
        return super().forward(microbatch, received)

    def before_last_backward(self) -> None:
        self.calls.append("before last")

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        self.calls.append(f"B{microbatch}")
        time.sleep(self._delay.choice(self._delays))
        return super().backward(microbatch, received)

    def end(self) -> None:
        """Add up the gradients of the model's copies."""
        self.calls.append("end")
        if self._group is not None:
            torch.distributed.all_reduce(self.weight.grad, group=self._group)


def stages_of(world, toy: Toy, delays: Sequence[float] = (0.0,)) -> Mapping[int, ToyStage]:
    """This rank's stages; every rank calls it, for the groups."""
    stages = {}
    for i, p in enumerate(toy.problem.pipelines):
        for stage, rank in enumerate(p.ranks):
            ranks = toy.copies(i, stage)
            group = world.group(ranks) if len(ranks) > 1 else None
            if rank == world.rank:
                stages[i] = ToyStage(toy, i, rank, group, delays)
    return stages
