"""The invariants in the docstring of verl_fuse/runtime/meter.py; a float is 4 bytes."""

import torch

from verl_fuse.runtime.meter import ActivationMeter


def test_what_autograd_keeps_counts_until_it_lets_go():
    weight = torch.nn.Parameter(torch.randn(3, 5))
    meter = ActivationMeter([weight])
    with meter.forward():
        y = (torch.randn(2, 3) @ weight).tanh()  # keeps its input 2x3, its result 2x5 and the weight
    assert (meter.held, meter.peak) == (64, 64)
    with meter.forward():
        z = (torch.randn(4, 3) @ weight).tanh()
    assert (meter.held, meter.peak) == (192, 192)
    y.sum().backward()
    assert (meter.held, meter.peak) == (128, 192)
    z.sum().backward()
    assert (meter.held, meter.peak) == (0, 192)
    with meter.forward():
        y = (torch.randn(2, 3) @ weight).tanh()
    assert (meter.held, meter.peak) == (64, 192)
    y.sum().backward()


def test_a_storage_counts_once_and_whole_however_often_and_in_whatever_part_it_is_kept():
    x = torch.randn(8, requires_grad=True)
    meter = ActivationMeter([])
    with meter.forward():
        y = (x[:2] * x[2:4]).sum() + x.square().sum()
    assert meter.held == 32
    y.backward()
    assert meter.held == 0


def test_a_graph_that_is_kept_stays_counted():
    x = torch.randn(8, requires_grad=True)
    meter = ActivationMeter([])
    with meter.forward():
        y = x.square().sum()
    y.backward(retain_graph=True)
    assert meter.held == 32
    del y
    assert meter.held == 0


def test_views_of_weights_do_not_count():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    meter = ActivationMeter([weight])
    x = torch.randn(2, 3, requires_grad=True)
    with meter.forward():
        y = x @ weight.t()
    assert meter.held == 24
    y.sum().backward()


def test_metering_does_not_change_gradients():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    x = torch.randn(2, 3)
    (x @ weight).tanh().square().sum().backward()
    plain, weight.grad = weight.grad, None
    with ActivationMeter([weight]).forward():
        y = (x @ weight).tanh().square().sum()
    y.backward()
    assert torch.equal(plain, weight.grad)
