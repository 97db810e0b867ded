"""Parallel-state views with real Megatron modules on four gloo processes: layouts, isolation, and a fused
program through two of them.

Shows the invariants in the docstrings of plugins/verl_fuse_pipeline/megatron/{view,placement}.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runtime"))
sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import CONTEXT, Ranks, World
from small_gpt import HIDDEN, LENGTH, SAMPLES, gpt, losses, open_view, tokens, whole_name

from ci.gpu.autograd import AutogradStage
from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.lower import lower_schedule
from verl_fuse.runtime.stage import TensorSpec
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


def layout(world: World, mirrored: bool, tp: int, pp: int) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    with open_view("actor", mirrored, tp, pp).active():
        groups = {
            "tensor": ps.get_tensor_model_parallel_group(),
            "pipeline": ps.get_pipeline_model_parallel_group(),
            "data": ps.get_data_parallel_group(),
        }
        found: dict[str, Any] = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        found["stage"] = ps.get_pipeline_model_parallel_rank(), ps.get_data_parallel_rank()
        found["first"], found["last"] = ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()
        found["embedding"] = ps.is_rank_in_embedding_group()
    return found


def columns(found: list[dict[str, Any]], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in found]


def test_a_straight_view_is_megatrons_own_layout(ranks: Ranks):
    assert columns(ranks.call(layout, False, 1, 4), "pipeline", "stage", "first", "last") == [
        ([0, 1, 2, 3], (0, 0), True, False),
        ([0, 1, 2, 3], (1, 0), False, False),
        ([0, 1, 2, 3], (2, 0), False, False),
        ([0, 1, 2, 3], (3, 0), False, True),
    ]
    assert columns(ranks.call(layout, False, 1, 2), "pipeline", "data") == [
        ([0, 2], [0, 1]),
        ([1, 3], [0, 1]),
        ([0, 2], [2, 3]),
        ([1, 3], [2, 3]),
    ]


def test_a_mirrored_pipeline_begins_on_its_last_rank(ranks: Ranks):
    assert columns(ranks.call(layout, True, 1, 4), "pipeline", "stage", "first", "last", "embedding") == [
        ([3, 2, 1, 0], (3, 0), False, True, True),
        ([3, 2, 1, 0], (2, 0), False, False, False),
        ([3, 2, 1, 0], (1, 0), False, False, False),
        ([3, 2, 1, 0], (0, 0), True, False, True),
    ]


def test_mirrored_copies_lie_side_by_side(ranks: Ranks):
    assert columns(ranks.call(layout, True, 1, 2), "pipeline", "data", "stage") == [
        ([1, 0], [0, 2], (1, 0)),
        ([1, 0], [1, 3], (0, 0)),
        ([3, 2], [0, 2], (1, 1)),
        ([3, 2], [1, 3], (0, 1)),
    ]


def test_tensor_parallel_ranks_stay_together_in_a_mirrored_view(ranks: Ranks):
    assert columns(ranks.call(layout, True, 2, 2), "tensor", "pipeline", "stage") == [
        ([0, 1], [2, 0], (1, 0)),
        ([0, 1], [3, 1], (1, 0)),
        ([2, 3], [2, 0], (0, 0)),
        ([2, 3], [3, 1], (0, 0)),
    ]


def isolation(world: World) -> list[Any]:
    from megatron.core import parallel_state as ps

    from verl_fuse_pipeline.megatron.view import _read

    before = _read()
    actor, critic = open_view("one", False, 1, 4), open_view("other", True, 1, 2)
    seen: list[Any] = [ps.is_initialized()]
    with actor.active():
        seen.append(ps.get_pipeline_model_parallel_world_size())
        with critic.active():
            seen.append(ps.get_pipeline_model_parallel_world_size())
            ps.set_virtual_pipeline_model_parallel_rank(7)
        seen.append((ps.get_pipeline_model_parallel_world_size(), ps.get_virtual_pipeline_model_parallel_rank()))
        try:
            with critic.active():
                seen.append(ps.get_virtual_pipeline_model_parallel_rank())
                raise KeyError
        except KeyError:
            seen.append(ps.get_pipeline_model_parallel_world_size())
    after = _read()
    seen.append(all(after[name] is before[name] for name in before))
    return seen


def test_views_nest_keep_what_is_theirs_and_leave_nothing_outside(ranks: Ranks):
    assert ranks.call(isolation) == [[False, 4, 2, (4, None), 7, 4, True]] * 4


def uninitialised(world: World) -> str:
    from verl_fuse.errors import FuseError
    from verl_fuse_pipeline.megatron.view import View

    with pytest.raises(FuseError) as caught:
        View("critic").self_test()
    return str(caught.value)


def test_a_view_that_holds_nothing_fails_its_self_test(ranks: Ranks):
    assert ranks.call(uninitialised)[0] == (
        "view 'critic' has no parallel state yet; initialise its engine inside it first"
    )


def sorted_anyway(world: World) -> str:
    """Return the self-test's error where torch sorts ranks behind Megatron's back."""
    from verl_fuse.errors import FuseError
    from verl_fuse_pipeline.megatron import placement

    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    placement.unsorted_groups = nothing
    with pytest.raises(FuseError) as caught:
        open_view("critic", True, 1, 4)
    return str(caught.value)


def test_the_self_test_notices_groups_that_were_sorted():
    with Ranks(4) as ranks:
        assert ranks.call(sorted_anyway)[0] == (
            "view 'critic': _PIPELINE_GLOBAL_RANKS are [3, 2, 1, 0], but torch has the group as [0, 1, 2, 3] and its "
            "ranks "
            "answer as [0, 1, 2, 3]; this torch or Megatron reorders groups"
        )


def old_torch(world: World) -> list[int]:
    """Without `sort_ranks`, the module's `sorted` is replaced; here on a torch that has both."""
    from verl_fuse_pipeline.megatron.placement import sorting_off

    with sorting_off():
        group = dist.new_group([3, 1, 0, 2])
    again = dist.new_group([3, 1, 0, 2])
    return [dist.get_rank(group), dist.get_rank(again)]


def test_groups_keep_their_order_on_torch_without_a_choice(ranks: Ranks):
    assert ranks.call(old_torch) == [[2, 0], [1, 1], [3, 2], [0, 3]]


class GptStage(AutogradStage):
    """A stage of a small GPT; its gradients are added up over its replicas at the end. Everything runs in its view."""

    def __init__(self, view: Any, model: torch.nn.Module, pipeline: int, count: int) -> None:
        first, last = view.pipeline[0] == dist.get_rank(), view.pipeline[-1] == dist.get_rank()
        specs = [TensorSpec((LENGTH, SAMPLES, HIDDEN), torch.float32)] * count
        self._view, self._model = view, model

        def stage(m: int, received: torch.Tensor | None) -> torch.Tensor:
            model.set_input_tensor(received)
            out = losses(model, tokens(pipeline, m))
            return out.mean() / count if last else out

        parameters = list(model.parameters())
        super().__init__(stage, parameters, None if first else specs, None if last else specs)

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        with self._view.active():
            return super().forward(microbatch, received)

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        with self._view.active():
            return super().backward(microbatch, received)

    def end(self) -> None:
        from megatron.core import parallel_state as ps

        with self._view.active():
            for weight in self._model.parameters():
                dist.all_reduce(weight.grad, group=ps.get_data_parallel_group())


def train(world: World, schedules: dict[str, Schedule]) -> tuple[list[str], list[float]]:
    """Gradients that differ between the schedules, and relative differences to one process
    that holds the whole model."""
    problem = next(iter(schedules.values())).problem
    views = {"actor": open_view("actor", False, 1, 4), "critic": open_view("critic", True, 1, 2)}
    links = world.links([p.ranks for p in problem.pipelines])
    gradients: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, schedule in schedules.items():
        models = {i: gpt(views[problem.pipelines[i].model], seed=i > 0) for i in links}
        stages = {
            i: GptStage(views[p.model], models[i], i, p.microbatches)
            for i, p in enumerate(problem.pipelines)
            if i in links
        }
        Executor(lower_schedule(schedule), world.rank, links, world.watch()).run(stages)
        gradients[name] = {(i, n): w.grad for i, model in models.items() for n, w in model.named_parameters()}
    whole = {model: whole_gradients(problem, model) for model in views}
    one, other = gradients.values()
    differing = [str(key) for key in one if not torch.equal(one[key], other[key])]
    distances = []
    for (i, name), gradient in one.items():
        model = problem.pipelines[i].model
        wanted = whole[model][whole_name(views[model], name)]
        distances.append(float((gradient - wanted).abs().max() / wanted.abs().max()))
    return differing, distances


def whole_gradients(problem: ScheduleProblem, model: str) -> dict[str, torch.Tensor]:
    """Without pipelines: the whole model in this process, all micro-batches of all copies."""
    view = open_view("whole", False, 1, 1)
    whole = gpt(view, seed=model == "critic")
    with view.active():
        for i, p in enumerate(problem.pipelines):
            for m in range(p.microbatches if p.model == model else 0):
                (losses(whole, tokens(i, m)).mean() / p.microbatches).backward()
    return {name: weight.grad for name, weight in whole.named_parameters()}


def test_a_fused_program_of_megatron_models_is_bitwise_the_serial_one(ranks: Ranks):
    critics = (Pipeline("critic", (1, 0), 4, 2, 4, 2), Pipeline("critic", (3, 2), 4, 2, 4, 2))
    problem = ScheduleProblem(4, (Pipeline("actor", range(4), 8, 1, 2, 1), *critics))
    schedules = {method: solve(problem, method, Budget(1.0)) for method in ("serial", "greedy")}
    assert schedules["greedy"].makespan < schedules["serial"].makespan
    found = ranks.call(train, schedules)
    assert [differing for differing, _ in found] == [[]] * 4
    assert all(distance < 1e-5 for _, distances in found for distance in distances)
