"""The invariants in the docstring of verl_fuse/runtime/executor.py that a single program can show, on two processes."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import CPU, Ranks, World
from toy import Toy, ToyStage, stages_of

from verl_fuse.errors import FuseError
from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.lower import lower
from verl_fuse.runtime.program import PipelineProgram
from verl_fuse.runtime.report import ProgramReport
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import parse_text

ORDERS = "0F0 0F1 1F0 1B0 0B0 0B1\n1F0 0F0 0B0 1B0 0F1 0B1\n"


def problem(activation: list[float]) -> ScheduleProblem:
    actor = Pipeline("actor", (0, 1), 2, 1, 2, activation)
    return ScheduleProblem(2, (actor, Pipeline("critic", (1, 0), 1, 1, 2, activation)))


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def run(world: World, problem: ScheduleProblem, text: str) -> tuple[ProgramReport, dict[int, list[str]]]:
    stages = stages_of(world, Toy(problem, seed=3))
    links = world.links([p.ranks for p in problem.pipelines])
    report = Executor(lower(problem, parse_text(text)), world.rank, links, world.watch()).run(stages)
    return report, {i: stage.calls for i, stage in stages.items()}


def test_ops_run_in_the_rows_order_between_begin_and_end(ranks: Ranks):
    (report, calls), (other, _) = ranks.call(run, problem([1, 1]), ORDERS)
    assert [span.args["op"] for span in report.spans] == ["0F0", "0F1", "1F0", "1B0", "0B0", "0B1"]
    assert [span.args["op"] for span in other.spans] == ["1F0", "0F0", "0B0", "1B0", "0F1", "0B1"]
    assert calls == {
        0: ["begin", "F0", "F1", "B0", "before last", "B1", "end"],
        1: ["begin", "F0", "before last", "B0", "end"],
    }


def test_spans_lie_on_the_ranks_track_one_after_the_other(ranks: Ranks):
    report, _ = ranks.call(run, problem([1, 1]), ORDERS)[1]
    assert {(span.track, span.category) for span in report.spans} == {("rank 1", "train")}
    assert [span.name for span in report.spans[:2]] == ["critic F0", "actor F0"]
    ends = [0.0, *(span.end for span in report.spans)]
    assert all(end <= span.start for end, span in zip(ends, report.spans, strict=False))
    assert all(span.args["waited"] >= 0.0 for span in report.spans)


def test_activations_are_freed_as_the_schedule_assumes(ranks: Ranks):
    """A toy stage keeps its input and the result of its tanh; the last stage also keeps its result for the square: the
    same storage."""
    toy = Toy(problem([1, 1]), seed=3)
    sizes = []
    for index in (0, 1):
        rows = toy.shape(index, 0, 0)[0]
        widths = [toy.width(index, stage) for stage in range(3)]
        sizes.append([4.0 * rows * (widths[stage] + widths[stage + 1]) for stage in (0, 1)])
    actor = Pipeline("actor", (0, 1), 1, 1, 2, sizes[0])
    measured = ScheduleProblem(2, (actor, Pipeline("critic", (1, 0), 1, 1, 2, sizes[1])))
    reports = [report for report, _ in ranks.call(run, measured, "0F0 1F0 1B0 0B0\n1F0 0F0 0B0 1B0\n")]
    assert [report.peak_bytes for report in reports] == [report.predicted_peak for report in reports]
    assert [report.held_bytes for report in reports] == [0, 0]


class Late(ToyStage):
    """Notes in the store when its last backward is done, and whether all ranks have done so when
    gradients are finalised."""

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        gradient = super().backward(microbatch, received)
        if self.calls[-2] == "before last":
            time.sleep(0.3 * self.world.rank)
            self.world.store.set(f"last op of rank {self.world.rank}", "")
        return gradient

    def end(self) -> None:
        self.calls.append(str(self.world.store.check(["last op of rank 0", "last op of rank 1"])))


def finalised(world: World) -> list[str]:
    single = ScheduleProblem(2, (Pipeline("actor", (0,), 2, 1, 2, 1), Pipeline("critic", (1,), 2, 1, 2, 1)))
    stage = Late(Toy(single, seed=3), world.rank, world.rank)
    stage.world = world
    program = lower(single, parse_text("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n"))
    Executor(program, world.rank, world.links([(0,), (1,)]), world.watch()).run({world.rank: stage})
    return stage.calls[-3:]


def test_gradients_are_finalised_after_the_last_op_of_every_rank(ranks: Ranks):
    assert ranks.call(finalised) == [["before last", "B1", "True"]] * 2


def test_lanes_must_be_those_of_the_rank(ranks: Ranks):
    assert ranks.call(wrong_lanes) == [
        "rank 0: stages for pipelines [0]; needs [0, 1]",
        "rank 1: stages for pipelines [0]; needs [0, 1]",
    ]


def threads(world: World) -> list[int]:
    """Threads of this process after each of a few programs; those of gloo's channels end when their program does."""
    counts = []
    for _ in range(8):
        run(world, problem([1, 1]), ORDERS)
        deadline = time.monotonic() + 10
        while any(t.name == "verl-fuse gloo" for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_programs_leave_no_threads_behind(ranks: Ranks):
    for counts in ranks.call(threads):
        # torch may start one of its own late; a thread left behind by each program would be seven more.
        assert max(counts) - counts[0] <= 1, counts


def follow_readme(world: World, block: str) -> list[str]:
    """Run the README's lines with the objects that they take as given."""
    given = {
        "schedule": solve(problem([1, 1]), "greedy", Budget(1.0)),
        "stages": stages_of(world, Toy(problem([1, 1]), seed=3)),
        "device": CPU,
        "store": world.store,
        "rank": world.rank,
        "ranks": range(world.size),
    }
    exec(block, given)
    return [span.name for span in given["report"].spans]


def test_the_readme_s_lines_run(ranks: Ranks, repo: Path):
    (block,) = re.findall(r"```python\n(.*?)```", (repo / "verl_fuse/runtime/README.md").read_text(), re.DOTALL)
    spans = ranks.call(follow_readme, block)
    assert (
        sorted(spans[0])
        == sorted(spans[1])
        == ["actor B0", "actor B1", "actor F0", "actor F1", "critic B0", "critic F0"]
    )


def wrong_lanes(world: World) -> str:
    stages = stages_of(world, Toy(problem([1, 1]), seed=3))
    links = world.links([(0, 1), (1, 0)])
    executor = Executor(lower(problem([1, 1]), parse_text(ORDERS)), world.rank, links, world.watch())
    with pytest.raises(FuseError) as caught:
        executor.run({0: stages[0]})
    return str(caught.value)


def refusals(world: World) -> list[str]:
    links = world.links([(0, 1), (1, 0)])
    program = lower(problem([1, 1]), parse_text(ORDERS))
    found = []
    for row, places, depth in ((1 - world.rank, links, 2), (world.rank, links, 0)):
        with pytest.raises(FuseError) as caught:
            Executor(program, row, places, world.watch(), depth)
        found.append(str(caught.value))
    unchecked = PipelineProgram(program.problem, program.rows[::-1])
    with pytest.raises(FuseError) as caught:
        Executor(unchecked, world.rank, links, world.watch())
    found.append(str(caught.value).splitlines()[0])
    return found


def test_links_of_other_stages_no_depth_and_unchecked_programs_are_refused(ranks: Ranks):
    assert ranks.call(refusals)[0] == [
        "pipeline 0: link of stage 0 of 2; needs 1 of 2",
        "depth=0; needs at least 1",
        "program: 1F0 on rank 0 comes where 1F0<1 is due",
    ]
