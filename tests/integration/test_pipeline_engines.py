"""Actor and critic trained as one pipeline inside verl's own Megatron engines: bitwise what stock verl
trains one after the other.

Three steps of verl's TrainingWorkers with its PPO losses, clipping, Adam, and a falling learning rate, on four gloo
processes. Shows the invariants in the docstrings of plugins/verl_fuse_pipeline/megatron/{engine,fusion}.py.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from small_engines import Case, Model, Ranks, Trained, cpu_server, exported, train, update_workers, write_model

pytest.importorskip("megatron.core")
pytest.importorskip("verl")
pytestmark = pytest.mark.integration

Run = Callable[[Case, bool], list[Trained]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's folder; meanwhile ranks have the cpu platform."""
    folder = tmp_path_factory.mktemp("model")
    with cpu_server():
        write_model(folder)
        yield folder


@pytest.fixture(scope="module")
def run(model: Path) -> Run:
    """Train a case on processes of its own."""

    def trained(case: Case, fused: bool) -> list[Trained]:
        with Ranks(4) as ranks:
            return ranks.call(train, model, case, fused)

    return trained


def parameters(found: list[Trained]) -> dict[tuple, str]:
    return {key: digest for rank in found for key, digest in rank.parameters.items()}


def metrics(found: list[Trained]) -> list[dict[str, list[str]]]:
    """Return verl's report of each step, from every rank that reports."""
    return [
        {model: sorted(str(rank.metrics[i][model]) for rank in found if rank.metrics[i][model]) for model in step}
        for i, step in enumerate(found[0].metrics)
    ]


def programs(found: list[Trained]) -> list[Any]:
    """Micro-batches of each joint call of the first step, and how many of these calls were fused."""
    assert all(rank.counts == found[0].counts for rank in found)
    return [found[0].counts[0], found[0].fused[0]]


TWO = Model(pp=2)
CASES = {
    "critic pp4": (Case(), [((8, 8),), 1]),
    "critic pp2 x dp2": (Case(critic=TWO), [((8, 4),), 1]),
    "tp2 x pp2": (Case(actor=Model(tp=2, pp=2), critic=Model(tp=2, pp=2)), [((8, 8),), 1]),
    "dp2 x pp2, distributed optimizer": (Case(actor=TWO, critic=TWO, distributed_optimizer=True), [((4, 4),), 1]),
    "two mini-batches": (Case(actor=Model(mini_batches=2), critic=Model(mini_batches=2, pp=2)), [((4, 2), (4, 2)), 2]),
    "unequal mini-batches and epochs": (
        Case(actor=Model(mini_batches=2), critic=Model(mini_batches=2, epochs=2), clip=0.01),
        [((4, 4), (4, 4), (0, 4), (0, 4)), 2],
    ),
    "one after the other, measured": (
        Case(actor=Model(mini_batches=2), critic=Model(pp=2, mini_batches=2, epochs=2), together=False),
        [((4, 2), (4, 2), (0, 2), (0, 2)), 0],
    ),
    "offloaded": (Case(actor=TWO, critic=TWO, distributed_optimizer=True, offload=True), [((4, 4),), 1]),
    "dynamic batch size": (Case(actor=Model(tokens=60), critic=Model(tokens=80)), [((5, 4),), 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_losses_and_gradient_norms_are_bitwise_those_of_stock_verl(run: Run, name: str):
    case, expected = CASES[name]
    stock, fused = run(case, False), run(case, True)
    assert programs(fused) == expected
    assert metrics(fused) == metrics(stock)
    assert all("grad_norm" in report for step in metrics(stock) for reports in step.values() for report in reports)
    assert parameters(fused) == parameters(stock)
    assert len({rank.parameters[key] for rank in stock for key in rank.parameters}) > 20


@pytest.mark.parametrize("fault", ["permuted", "repeated"])
def test_micro_batches_in_another_order_or_a_wrong_one_are_detected(run: Run, fault: str):
    # Adam's first step hardly depends on a gradient's rounding.
    case = Case(steps=2)
    stock, wrong = run(case, False), run(replace(case, fault=fault), True)
    changed = {key[0] for key, digest in parameters(stock).items() if parameters(wrong)[key] != digest}
    assert changed == {"actor"}
    steps = list(zip(metrics(wrong), metrics(stock), strict=True))
    assert all(ours["critic"] == theirs["critic"] for ours, theirs in steps)
    # The rounding of a sum in another order may be the same in one step.
    assert any(ours["actor"] != theirs["actor"] for ours, theirs in steps)


def test_a_fused_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(run: Run, tmp_path: Path):
    case = Case(critic=TWO, distributed_optimizer=True)
    run(replace(case, steps=1, save=tmp_path), True)
    resumed = run(replace(case, first=1, load=tmp_path), True)
    stock = run(case, False)
    assert metrics(resumed) == metrics(stock)[1:]
    assert parameters(resumed) == parameters(stock)


def test_worker_classes_measure_first_and_run_what_a_solver_finds_then(run: Run, model: Path):
    with Ranks(4) as ranks:
        found = ranks.call(update_workers, model)
    # 8 micro-batches of two models, forwards and backwards; fused, as many predicted ones.
    for rank, (steps, _) in enumerate(found):
        assert steps == [
            (((8, 8),), fused, spans, rank == 0, rank == 3) for fused, spans in ((0, 32), (1, 64), (1, 64))
        ]
    assert {key: digest for _, digests in found for key, digest in digests.items()} == parameters(run(Case(), False))


def test_weights_leave_a_view_as_they_came(model: Path):
    import torch
    from safetensors.torch import load_file

    with Ranks(4) as ranks:
        found = ranks.call(exported, model)
    digests = {
        name: hashlib.sha256(weight.to(torch.bfloat16).float().numpy().tobytes()).hexdigest()[:16]
        for name, weight in load_file(model / "model.safetensors").items()
    }
    assert found == [digests] * 4
