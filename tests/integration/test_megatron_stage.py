"""Megatron models through the fused executor, on four gloo processes: bitwise what Megatron's own 1F1B computes, with
its own DistributedDataParallel and gradient finalisation. Shows the invariants in the docstring of
plugins/verl_fuse_pipeline/megatron/stage.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runtime"))
sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import CONTEXT, CPU, Ranks, World
from small_gpt import MESSAGE, forward_backward, gpt, open_view, replica, step, tokens

from verl_fuse.errors import FuseError
from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.lower import lower_schedule
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule

pytestmark = pytest.mark.integration
CONTEXT.set_forkserver_preload(["verl_fuse.runtime.executor", "megatron.core.models.gpt"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def fused_schedule(tp: int, stages: int, microbatches: int, critic_microbatches: int) -> Schedule:
    """An actor over all ranks and as many reversed critics of `stages` stages as fit; a rank of the
    problem is `tp` processes."""
    width = 4 // tp
    actor = Pipeline("actor", range(width), microbatches, 1, 2, 1)
    critics = [
        Pipeline("critic", range(last, last - stages, -1), critic_microbatches, 2, 4, 2)
        for last in range(stages - 1, width, stages)
    ]
    schedule = solve(ScheduleProblem(width, (actor, *critics)), "greedy", Budget(1.0))
    assert schedule.makespan < solve(schedule.problem, "serial", Budget(1.0)).makespan
    return schedule


def compared(world: World, schedule: Schedule, tp: int, options: dict[str, bool], wrong: bool) -> list[str]:
    """Return losses and gradients of this rank that are not bitwise those of Megatron's 1F1B; `wrong`: the actor
    repeats its first micro-batch."""
    from verl_fuse_pipeline.megatron.stage import ForwardBackwardCall, MegatronStage

    problem, row = schedule.problem, world.rank // tp
    views = {p.model: open_view(p.model, p.model == "critic", tp, p.stages) for p in problem.pipelines}
    every = [[rank * tp + t for rank in p.ranks] for p in problem.pipelines for t in range(tp)]
    links = {index // tp: link for index, link in world.links(every).items()}
    serial, fused, data = {}, {}, {}
    for i, link in links.items():
        p = problem.pipelines[i]
        assert views[p.model].pipeline == link.ranks
        serial[i] = replica(views[p.model], i > 0, **options)
        fused[i] = replica(views[p.model], i > 0, **options)
        data[i] = [tokens(i, m) for m in range(p.microbatches)]
    expected = {i: forward_backward(views[problem.pipelines[i].model], serial[i], step, data[i]) for i in links}
    if wrong:
        data[0][1] = data[0][0]
    stages = {
        i: MegatronStage(
            views[problem.pipelines[i].model],
            ForwardBackwardCall(step, iter(data[i]), [fused[i]], len(data[i])),
            [MESSAGE] * len(data[i]),
            CPU,
        )
        for i in links
    }
    Executor(lower_schedule(schedule), row, links, world.watch()).run(stages)
    different = [f"losses of {problem.pipelines[i].model}" for i in links if stages[i].results != expected[i]]
    for i in links:
        for (name, ours), theirs in zip(fused[i].named_parameters(), serial[i].parameters(), strict=True):
            assert theirs.main_grad.abs().max() > 0
            if not torch.equal(ours.main_grad, theirs.main_grad):
                different.append(f"{problem.pipelines[i].model} {name}")
    return different


@pytest.mark.parametrize(
    ("tp", "stages", "microbatches", "critic_microbatches"),
    [(1, 4, 4, 4), (1, 2, 6, 3), (2, 2, 4, 5), (1, 4, 2, 1)],
    ids=["pp4 and pp4", "pp4 and pp2 x dp2", "tp2 x pp2 and tp2 x pp2", "fewer micro-batches than stages"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}],
    ids=["all-reduce", "distributed optimizer", "overlapped all-reduce"],
)
def test_a_fused_program_is_bitwise_megatrons_own_1f1b(
    ranks: Ranks, tp: int, stages: int, microbatches: int, critic_microbatches: int, options: dict[str, bool]
):
    schedule = fused_schedule(tp, stages, microbatches, critic_microbatches)
    assert ranks.call(compared, schedule, tp, options, False) == [[]] * 4


def loss_scales(world: World) -> list[float]:
    """Return the scale of routers' losses in the backward passes of two models that take turns."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from verl_fuse_pipeline.megatron import stage

    view, seen, turns = open_view("actor", False, 1, 4), [], iter((2.0, 8.0))

    def forward(*_: Any, **__: Any) -> tuple[torch.Tensor, int]:
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / next(turns))
        return torch.zeros(1), 0

    def backward(*_: Any) -> None:
        seen.append(float(MoEAuxLossAutoScaler.main_loss_backward_scale))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
        patch.setattr(stage, "forward_step", forward)
        patch.setattr(stage, "backward_step", backward)
        models: list[Any] = [gpt(view, seed) for seed in (0, 1)]
        for model in models:
            model.config.num_moe_experts = 4
        calls = [stage.ForwardBackwardCall(step, iter(()), [model], 1) for model in models]
        taking_turns = [stage.MegatronStage(view, call, [MESSAGE], CPU) for call in calls]
        for each in taking_turns:
            each.forward(0, None)
        for each in taking_turns:
            each.backward(0, None)
    return seen


def test_the_losses_of_routers_are_scaled_by_their_own_model_s_micro_batches(ranks: Ranks):
    assert ranks.call(loss_scales) == [[0.5, 0.125]] * 4


def test_a_wrong_micro_batch_is_seen_in_every_stage_of_its_model(ranks: Ranks):
    found = ranks.call(compared, fused_schedule(1, 4, 4, 4), 1, {}, True)
    assert all(different for different in found)
    assert {entry.split()[0] for different in found for entry in different} == {"actor", "losses"}
    assert found[3][0] == "losses of actor"


def refused(world: World) -> list[str]:
    from verl_fuse_pipeline.megatron.stage import ForwardBackwardCall, MegatronStage

    view = open_view("actor", False, 1, 4)
    model: Any = gpt(view, 0)
    messages = []
    for option, stages in (({"timers": print}, 1), ({"defer_embedding_wgrad_compute": True}, 1), ({}, 2)):
        for name, value in option.items():
            setattr(model.config, name, value)
        with pytest.raises(FuseError) as caught:
            MegatronStage(view, ForwardBackwardCall(step, iter(()), [model] * stages, 1), [], CPU)
        messages.append(str(caught.value))
        model.config.timers, model.config.defer_embedding_wgrad_compute = None, False
    return messages


def test_what_only_megatrons_schedules_do_is_refused(ranks: Ranks):
    assert ranks.call(refused)[0] == [
        "model 'actor': timers=<built-in function print> is for Megatron's own schedules; needs None",
        "model 'actor': defer_embedding_wgrad_compute=True is for Megatron's own schedules; needs False",
        "model 'actor' has 2 virtual pipeline stages on a rank; 1 can run",
    ]
