"""The invariants in the docstring of ci/gpu/autograd.py."""

import gc
import weakref

import pytest
import torch

from ci.gpu.autograd import AutogradStage
from verl_fuse.runtime.stage import TensorSpec

SPECS = [TensorSpec((2, 2), torch.float32)] * 2


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_gradients_add_up_in_the_order_of_the_backwards(weight: torch.nn.Parameter):
    stage = AutogradStage(lambda m, x: x @ weight, [weight], SPECS, SPECS)
    stage.forward(0, torch.eye(2))
    stage.forward(1, 10 * torch.eye(2))
    assert torch.equal(stage.backward(0, torch.eye(2)), weight.T)
    assert torch.equal(weight.grad, torch.eye(2))
    stage.backward(1, torch.eye(2))
    assert torch.equal(weight.grad, 11 * torch.eye(2))


def test_the_first_stage_makes_no_gradient_and_the_last_keeps_its_losses(weight: torch.nn.Parameter):
    first = AutogradStage(lambda m, x: torch.ones(2, 2) @ weight, [weight], None, SPECS)
    assert first.forward(0, None).requires_grad is False
    assert first.backward(0, torch.ones(2, 2)) is None
    last = AutogradStage(lambda m, x: (x @ weight).sum(), [weight], SPECS, None)
    assert last.forward(0, torch.eye(2)) is None
    assert torch.equal(last.losses[0], torch.tensor(10.0))
    assert torch.equal(last.backward(0, None), torch.tensor([[3.0, 7.0], [3.0, 7.0]]))


def test_results_are_not_kept_after_the_forward_nor_anything_after_the_backward(weight: torch.nn.Parameter):
    results, inputs = [], []

    def compute(m: int, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        inputs.append(weakref.ref(x))
        y = x @ weight  # autograd needs x, not y
        results.append(weakref.ref(y))
        return y

    stage = AutogradStage(compute, [weight], SPECS, SPECS)
    stage.forward(0, torch.eye(2))
    gc.collect()
    assert results[0]() is None
    assert inputs[0]() is not None
    stage.backward(0, torch.eye(2))
    gc.collect()
    assert inputs[0]() is None
