"""Captures the calls of `forward_backward_func` of actor and critic in verl's own training loops, and runs them as
programs of this process's ranks.

verl's loop, losses, micro-batches, optimizers, schedulers and metrics stay verl's: only the function that runs a
mini-batch's pipeline is another one while `run` runs its jobs. Calls of both models are one program if there is a
schedule for their numbers of micro-batches; else, and when one model has mini-batches left, each model's calls run
alone, in Megatron's order (1F1B).

Invariants (tests/integration/test_pipeline_engines.py):
- parameters, losses and gradient norms are bitwise those of verl's engines trained one after the other;
- every rank runs the same programs in the same order.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.host.weights.megatron_memory import offloaded_bytes
from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.links import Link, open_links
from verl_fuse.runtime.lower import lower_schedule
from verl_fuse.runtime.report import ProgramReport
from verl_fuse.runtime.watch import Watch
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.timeline import Span
from verl_fuse_pipeline.joint import JointCalls
from verl_fuse_pipeline.megatron.captured import CapturedCall, capturing
from verl_fuse_pipeline.megatron.messages import Padding
from verl_fuse_pipeline.megatron.stage import MegatronStage
from verl_fuse_pipeline.megatron.view import View
from verl_fuse_pipeline.report import MODELS, ModelCost, RankReport

Schedules = Mapping[tuple[int, int], Schedule]
"""Micro-batches of actor and critic -> what runs them."""


class Fusion:
    """This process's part; collective, after both engines are initialised. `timeout` (seconds) bounds every wait of a
    program."""

    def __init__(self, engines: Mapping[str, Any], timeout: float) -> None:
        self._engines = {model: engines[model] for model in MODELS}
        self.width = _width(self._engines)
        self._padding = {
            model: Padding.of(engine.engine_config, engine.tf_config) for model, engine in self._engines.items()
        }
        self._pipelines = {model: _pipelines(engine.view) for model, engine in self._engines.items()}
        self.device = torch.device(next(self._engines["actor"].module[0].parameters()).device)
        self._links = self._open_links()
        store: Any = dist.distributed_c10d._get_default_store()
        self._watch = Watch("fused update", store, dist.get_rank(), range(dist.get_world_size()), timeout)
        self._alone: dict[tuple[str, int], Schedule] = {}

    @property
    def placements(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the ranks of the problem, in stage order, of every pipeline of each model."""
        return {
            model: tuple(
                tuple(rank // self.width for rank in ranks) for ranks in pipelines if ranks[0] % self.width == 0
            )
            for model, pipelines in self._pipelines.items()
        }

    def run(
        self, jobs: Mapping[str, Callable[[], Any]], schedules: Schedules, together: bool
    ) -> tuple[dict[str, Any], RankReport]:
        """Run each model's job; without `together` one after the other, the critic first."""
        update = _Update(self, schedules)
        contexts = {model: self._engines[model].view.active for model in jobs}
        results: dict[str, Any] = {}
        for group in [jobs] if together else [{model: jobs[model]} for model in reversed(MODELS)]:
            calls = JointCalls(update.make, contexts)
            with capturing(calls):
                results |= calls.run(group)
        return results, update.report()

    def alone(self, model: str, microbatches: int) -> Schedule:
        """Return Megatron's own order of one model's micro-batches."""
        if (model, microbatches) not in self._alone:
            pipelines = [Pipeline(model, ranks, microbatches, 1, 2, 1) for ranks in self.placements[model]]
            problem = ScheduleProblem(dist.get_world_size() // self.width, tuple(pipelines))
            self._alone[model, microbatches] = solve(problem, "serial", Budget(60.0))
        return self._alone[model, microbatches]

    def execute(self, schedule: Schedule, calls: Mapping[str, CapturedCall]) -> ProgramReport:
        """Run one program over the calls of its models."""
        links: dict[int, Link] = {}
        stages: dict[int, MegatronStage] = {}
        seen: dict[str, int] = {}
        for index, pipeline in enumerate(schedule.problem.pipelines):
            copy = seen[pipeline.model] = seen.get(pipeline.model, -1) + 1
            if (link := self._links.get((pipeline.model, copy))) is not None:
                call = calls[pipeline.model]
                links[index] = link
                stages[index] = MegatronStage(self._engines[pipeline.model].view, call.call, call.specs, self.device)
                call.results = stages[index].results
        row = dist.get_rank() // self.width
        return Executor(lower_schedule(schedule), row, links, self._watch).run(stages)

    def captured(self, model: str, request: Mapping[str, Any]) -> CapturedCall:
        return CapturedCall(request, self._padding[model])

    def headroom(self) -> int | None:
        """Return the bytes that activations may take on this rank, beside allocated bytes and bytes that verl has
        offloaded, which come back for an update; None on a device that does not tell."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free - sum(offloaded_bytes(engine) for engine in self._engines.values())

    def _open_links(self) -> dict[tuple[str, int], Link]:
        """Open the links by model and copy; every rank of tensor and context parallelism has links of its own."""
        keys = [(model, copy) for model in MODELS for copy in range(len(self.placements[model]))]
        ranks = [[rank * self.width + t for rank in self.placements[m][c]] for m, c in keys for t in range(self.width)]
        return {keys[index // self.width]: link for index, link in open_links(ranks, self.device).items()}


class _Update:
    """Makes the calls of one update, and measures them."""

    def __init__(self, fusion: Fusion, schedules: Schedules) -> None:
        self._fusion = fusion
        self._schedules = schedules
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._activations: dict[str, float] = {}
        self._counts: dict[str, list[int]] = {model: [] for model in MODELS}
        self._spans: list[Span] = []
        self._fused = 0

    def make(self, requests: dict[str, Mapping[str, Any]]) -> dict[str, Any]:
        calls = {model: self._fusion.captured(model, request) for model, request in requests.items()}
        for model, call in calls.items():
            self._counts[model].append(call.call.microbatches)
        actor, critic = (calls[model].call.microbatches if model in calls else 0 for model in MODELS)
        schedule = self._schedules.get((actor, critic))
        if schedule is not None:
            self._fused += 1
            self._run(schedule, calls)
        else:
            for model in reversed(MODELS):
                if model in calls:
                    alone = self._fusion.alone(model, calls[model].call.microbatches)
                    report = self._run(alone, {model: calls[model]})
                    if report.predicted_peak:
                        self._activations[model] = report.peak_bytes / report.predicted_peak
        return {model: call.results for model, call in calls.items()}

    def _run(self, schedule: Schedule, calls: Mapping[str, CapturedCall]) -> ProgramReport:
        begun = time.time()
        report = self._fusion.execute(schedule, calls)
        self._spans += report.spans
        if len(calls) > 1:
            self._spans += predicted(schedule, dist.get_rank(), self._fusion.width, begun)
        for span in report.spans:
            model, op = span.name.split()
            self._seconds.setdefault((model, op[0]), []).append(span.seconds)
        return report

    def report(self) -> RankReport:
        costs = {
            model: ModelCost(
                statistics.median_high(self._seconds[model, "F"]),
                statistics.median_high(self._seconds[model, "B"]),
                self._activations.get(model),
            )
            for model in MODELS
            if (model, "F") in self._seconds
        }
        rank = dist.get_rank() // self._fusion.width
        return RankReport(
            rank,
            self._fusion.placements,
            costs,
            # Also of calls made one after the other: together they would have been these.
            tuple(zip_longest(self._counts["actor"], self._counts["critic"], fillvalue=0)),
            self._fused,
            self._fusion.headroom(),
            tuple(self._spans),
        )


def predicted(schedule: Schedule, rank: int, width: int, begun: float) -> list[Span]:
    """Return the schedule's ops of this rank as spans on a track of their own, as if it had begun then."""
    return [
        Span(
            f"{schedule.problem.pipelines[op.pipeline].model} {op.kind}{op.microbatch}",
            f"plan {rank}",
            "train",
            begun + op.start,
            begun + op.end,
            {"op": op.token, "predicted": 1},
        )
        for op in schedule.rows[rank // width]
    ]


def _width(engines: Mapping[str, Any]) -> int:
    """Return the ranks per stage, tensor times context parallelism, which must be the same for both."""
    widths = {
        model: engine.engine_config.tensor_model_parallel_size * engine.engine_config.context_parallel_size
        for model, engine in engines.items()
    }
    if len(set(widths.values())) > 1:
        raise FuseError(f"tensor x context parallel sizes {widths}; a fused update needs the same for actor and critic")
    return widths["actor"]


def _pipelines(view: View) -> tuple[tuple[int, ...], ...]:
    """Return the global ranks of every pipeline of a model; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, view.pipeline)
    return tuple(sorted(set(found), key=min))
