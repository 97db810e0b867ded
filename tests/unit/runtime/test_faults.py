"""Dead, stuck, frozen, failing and disagreeing ranks: every other rank ends within the timeout, and
all name the same culprit."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, Ranks, World
from toy import Toy, ToyStage, stages_of

from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.guard import EXIT_CODE, SILENCE_SECONDS
from verl_fuse.runtime.lower import lower
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import parse_text

PROBLEM = ScheduleProblem(3, (Pipeline("actor", (0, 1, 2), 2, 1, 2, 1), Pipeline("critic", (2, 1, 0), 2, 1, 2, 1)))
ACTOR_FIRST = "0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1\n" * 3
OTHER = "0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1\n" * 2 + "0F0 0B0 0F1 0B1 1F0 1B0 1F1 1B1\n"
TIMEOUT = 3.0
# What a machine that does much else may need on top.
PATIENCE = 60.0


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(3, tmp_path) as ranks:
        yield ranks


class Faulty(ToyStage):
    """A stage whose forward of micro-batch 1 does something else first."""

    fault: Callable[[], None]

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        if microbatch == 1:
            self.fault()
        return super().forward(microbatch, received)


def run(world: World, culprit: int, fault: Callable[[], None], timeout: float = TIMEOUT) -> None:
    """`culprit` meets its fault in the actor's second forward."""
    stages = dict(stages_of(world, Toy(PROBLEM, seed=0)))
    if world.rank == culprit:
        stages[0] = Faulty(Toy(PROBLEM, seed=0), 0, world.rank)
        stages[0].fault = fault
    execute(world, stages, ACTOR_FIRST, timeout)


def execute(world: World, stages: dict[int, ToyStage], text: str, timeout: float = TIMEOUT) -> None:
    links = world.links([p.ranks for p in PROBLEM.pipelines])
    executor = Executor(lower(PROBLEM, parse_text(text)), world.rank, links, world.watch(timeout))
    dist.barrier()
    executor.run(stages)


def ended(ranks: Ranks, *call) -> list[Outcome]:
    """Outcomes, which must be there soon after the timeout."""
    begun = time.monotonic()
    ranks.start(*call)
    outcomes = ranks.outcomes(TIMEOUT + PATIENCE)
    assert time.monotonic() - begun < TIMEOUT + PATIENCE
    return outcomes


def verdicts(outcomes: list[Outcome], *ranks: int) -> set[str]:
    """Return the common text of these ranks' errors, without each rank's text about itself."""
    texts = [outcomes[rank].error for rank in ranks]
    assert all(text.startswith("Stopped: pipeline program stopped: ") for text in texts), texts
    return {
        re.sub(r" \(this is rank .*\)$", "", text.removeprefix("Stopped: pipeline program stopped: ")) for text in texts
    }


def die() -> None:
    time.sleep(0.5)  # the others wait by then
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_by_all_others(ranks: Ranks):
    outcomes = ended(ranks, run, 2, die)
    (verdict,) = verdicts(outcomes, 0, 1)
    assert re.fullmatch(r"rank 2 closed its connection to rank 1; it has been running 0F1 for \d+\.\d s", verdict)
    assert outcomes[2].exit_code == -signal.SIGKILL


def test_a_killed_rank_that_hosts_the_store_is_named_by_its_neighbour_and_the_store_by_all(ranks: Ranks):
    outcomes = ended(ranks, run, 0, die)
    assert "rank 0 closed its connection to rank 1" in outcomes[1].error
    assert all("the store is gone, so the process that hosts it has ended" in outcomes[rank].error for rank in (1, 2))
    assert outcomes[0].exit_code == -signal.SIGKILL


def sleep() -> None:
    time.sleep(600)


def test_a_stuck_rank_is_named_by_all_others_and_ended_by_its_guard(ranks: Ranks, tmp_path: Path):
    outcomes = ended(ranks, run, 1, sleep)
    (verdict,) = verdicts(outcomes, 0, 2)
    assert re.fullmatch(
        r"rank [02] waited 3\.\d s for 0[BF][01] from rank 1: rank 1 has been running 0F1 for \d\.\d s", verdict
    )
    assert outcomes[1].exit_code == EXIT_CODE
    shown = (tmp_path / "1.txt").read_text()
    assert "verl-fuse: rank 1 ends, it is stuck in a program: rank" in shown
    assert "in sleep" in shown


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_frozen_process_is_named_by_all_others(ranks: Ranks):
    ranks.start(run, 1, freeze, SILENCE_SECONDS + 1)
    outcomes = [ranks.outcome(rank, TIMEOUT + PATIENCE) for rank in (0, 2)]
    (verdict,) = verdicts(outcomes, 0, 1)
    assert verdict.endswith("and its process does not answer")
    assert ": rank 1 has been running 0F1 for" in verdict
    os.kill(ranks.pid(1), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no data")


def test_a_failing_rank_raises_its_own_error_and_is_named_by_all_others(ranks: Ranks):
    outcomes = ended(ranks, run, 1, fail)
    assert outcomes[1].error == "ValueError: no data"
    assert verdicts(outcomes, 0, 2) == {"rank 1 failed at 0F1: ValueError: no data"}


def run_other(world: World, culprit: int) -> None:
    execute(world, dict(stages_of(world, Toy(PROBLEM, seed=0))), OTHER if world.rank == culprit else ACTOR_FIRST)


def test_a_rank_with_another_op_list_is_named_by_all_before_the_first_op(ranks: Ranks):
    assert verdicts(ended(ranks, run_other, 0), 0, 1, 2) == {
        "op lists differ: rank 0 against ranks 1, 2, in the op list of rank 2"
    }


def run_mixed_up(world: World, culprit: int) -> None:
    """The culprit thinks that micro-batch 1 of the actor is as large as micro-batch 2."""
    toy = Toy(PROBLEM, seed=0, reads={(0, 1): 2} if world.rank == culprit else {})
    execute(world, dict(stages_of(world, toy)), ACTOR_FIRST)


def test_a_micro_batch_of_another_size_is_named_by_all_before_the_first_op(ranks: Ranks):
    assert verdicts(ended(ranks, run_mixed_up, 2), 0, 1, 2) == {
        "ranks 1, 2 expect different messages on connection 0B 2>1 (pipeline, kind, ranks)"
    }


def run_without(world: World, culprit: int) -> None:
    stages = dict(stages_of(world, Toy(PROBLEM, seed=0)))
    links = world.links([p.ranks for p in PROBLEM.pipelines])
    executor = Executor(lower(PROBLEM, parse_text(ACTOR_FIRST)), world.rank, links, world.watch(TIMEOUT))
    dist.barrier()
    executor.run(stages)
    if world.rank == culprit:
        world.store.wait(["verl_fuse/3.0/verdict"])
    else:
        executor.run(stages)


def test_a_rank_that_does_not_come_is_named_by_all_others(ranks: Ranks):
    (verdict,) = verdicts(ended(ranks, run_without, 1), 0, 2)
    assert re.fullmatch(
        r"rank [02] waited 3\.\d s for agreement from rank \d, \d: "
        r"rank 1 has not started this program; it has been running what follows program 1 for \d\.\d s",
        verdict,
    )


class Misshapen(ToyStage):
    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        result = super().forward(microbatch, received)
        return None if result is None else result[:-1]


def run_misshapen(world: World) -> None:
    stages = dict(stages_of(world, Toy(PROBLEM, seed=0)))
    if world.rank == 0:
        stages[0] = Misshapen(Toy(PROBLEM, seed=0), 0, 0)
    execute(world, stages, ACTOR_FIRST)


def test_a_result_of_another_shape_is_not_sent(ranks: Ranks):
    outcomes = ended(ranks, run_misshapen)
    assert "0F0 made TensorSpec(shape=(1, " in outcomes[0].error
    assert all("rank 0 failed at 0F0: FuseError: 0F0 made" in outcomes[rank].error for rank in (1, 2))
