"""Counts of one device's share, by hand."""

import pytest

from verl_fuse.cost import shard
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model

DENSE = Model("dense", 2, 8, 4, 2, 2, 16, 100)
MOE = Model("moe", 2, 8, 4, 2, 2, 16, 100, experts=4, experts_per_token=1)


def test_operations_of_a_block():
    projections, mlp = 2 * 8 * 8 + 2 * 8 * 4, 3 * 8 * 16
    assert shard.block_flops(DENSE, Layout(), 10) == 2 * 10 * (projections + mlp + 2 * 8)
    assert shard.block_flops(DENSE, Layout(tp=2, cp=2), 10) == shard.block_flops(DENSE, Layout(), 10) / 4


def test_attention_is_causal():
    """Scores and values are 2 * 2 * heads * head_dim operations for each of n * n / 2 pairs."""
    assert shard.attention_flops(DENSE, Layout(), 100) == 2 * 2 * 4 * 2 * 100 / 2


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1.0), (2, 1.75), (1000, 4.0)])
def test_tokens_touch_the_experts_they_are_sent_to(tokens: int, experts: float):
    rest = MOE.block_parameters - 4 * 3 * 8 * 16
    expected = 2 * (rest + experts * 3 * 8 * 16)
    assert shard.block_weight_bytes(MOE, Layout(), tokens) == pytest.approx(expected)


def test_experts_are_shared_out():
    whole, shared = (shard.block_parameters(MOE, layout) for layout in (Layout(dp=4), Layout(dp=4, ep=4)))
    assert whole - shared == 3 * 3 * 8 * 16


def test_folded_experts_are_whole():
    """Four experts over two tensor and two data ranks: one of them on each, where the rest is cut in two."""
    rest, experts = MOE.block_parameters - 4 * 3 * 8 * 16, 3 * 8 * 16
    assert shard.block_parameters(MOE, Layout(tp=2, dp=2, ep=4)) == rest / 2 + experts
    assert shard.block_parameters(MOE, Layout(tp=2, dp=2, ep=2)) == rest / 2 + 2 * experts / 2
    assert shard.block_weight_bytes(MOE, Layout(tp=2, dp=2, ep=4), 1000) == pytest.approx(2 * (rest / 2 + experts))


def test_kv_heads_are_split_until_there_is_one():
    sizes = [shard.kv_bytes_per_token(DENSE, Layout(tp=tp)) for tp in (1, 2, 4)]
    assert sizes == [2 * 2 * 2 * 2, 2 * 2 * 2, 2 * 2 * 2]
