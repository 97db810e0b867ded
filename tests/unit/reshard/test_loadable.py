"""The invariants in the docstrings of verl_fuse/reshard/loadable.py and chunks.py."""

import math
import random
from itertools import pairwise

import pytest
from layouts import LLAMA, MOE, QWEN2, QWEN3, SMALL, fits, random_sharding
from transfer_check import check

from verl_fuse.reshard.chunks import chunks
from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.program import lower_bound, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.vllm import VllmSharding


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_is_sent_what_vllm_keeps_at_its_place_in_the_whole_parameter(seed: int):
    draw = random.Random(seed)
    weights = draw.choice((QWEN2, LLAMA, QWEN3, MOE))
    engines = draw.choice(
        [
            v
            for v in (VllmSharding(1, 4), VllmSharding(2, 3), VllmSharding(4), VllmSharding(8), VllmSharding(8, 2))
            if fits(v, weights)
        ]
    )
    source = PlacedSharding.at(random_sharding(draw, weights, 16), draw.choice((0, 16)))
    nodes = [rank // 8 for rank in range(32)]
    loadable, own = (
        plan_transfer(weights, source, PlacedSharding.at(target), nodes=nodes, bucket_bytes=4096)
        for target in (LoadableSharding(engines), engines)
    )
    check(loadable)
    assert (loadable.bytes, loadable.network_bytes) == (own.bytes, own.network_bytes) == lower_bound(loadable)
    for rank in range(engines.devices):
        local = loadable.target.tensors(weights, rank)
        assert [(tensor.name, math.prod(tensor.shape)) for tensor in local] == [
            (p.name, p.elements) for p in weights.parameters
        ]
        for tensor in local:
            parameter = weights.parameters[weights.index[tensor.name]]
            for piece in tensor.pieces:
                place = piece.row * parameter.columns + piece.column
                assert (piece.offset, piece.stride) == (place, parameter.columns)
        kept = sum(piece.rows * piece.columns for tensor in local for piece in tensor.pieces)
        assert kept == sum(p.rows * p.columns for t in engines.tensors(weights, rank) for p in t.pieces)


def test_it_is_not_taken_for_vllms_own_layout():
    one, other = (
        plan_transfer(LLAMA, PlacedSharding.at(VllmSharding(1)), PlacedSharding.at(target), nodes=[0, 0])
        for target in (VllmSharding(2), LoadableSharding(VllmSharding(2)))
    )
    assert str(other.target) == "loadable vllm tp2 on 0,1"
    assert one.digest != other.digest


@pytest.mark.parametrize("limit", [1, 50, 5_000, 10**9])
@pytest.mark.parametrize("weights", SMALL, ids=lambda weights: weights.model.name)
def test_chunks_hold_every_parameter_once_and_only_long_ones_exceed_the_limit(weights, limit: int):
    found = list(chunks(weights, limit))
    assert tuple(p for chunk in found for p in chunk.parameters) == weights.parameters
    assert all(chunk.elements <= limit or len(chunk.parameters) == 1 for chunk in found)
    for chunk, after in pairwise(found):
        assert chunk.elements + after.parameters[0].elements > limit, "not cut without need"
