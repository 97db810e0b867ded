"""The invariants in the docstring of verl_fuse/reshard/sharding.py, for every layout; literal layouts against
frameworks' conventions."""

import random

import numpy as np
import pytest
from layouts import LLAMA, MOE, QWEN2, QWEN3, SMALL, random_sharding

from verl_fuse.errors import FuseError
from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.parameters import ModelParameters, parameters_of
from verl_fuse.reshard.sharding import PlacedSharding, Sharding
from verl_fuse.reshard.text import sharding_from
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named


def from_cells(sharding: Sharding, weights: ModelParameters, rank: int) -> dict[str, np.ndarray]:
    """Which elements of each parameter a rank owns."""
    found = {}
    for parameter in weights.parameters:
        cells = sharding.cells(weights, parameter)
        mask = np.zeros((cells.rows[-1], cells.columns[-1]), np.bool_)
        for i, line in enumerate(cells.owners):
            for j, owners in enumerate(line):
                if rank in owners:
                    mask[cells.rows[i] : cells.rows[i + 1], cells.columns[j] : cells.columns[j + 1]] = True
        if mask.any():
            found[parameter.name] = mask
    return found


@pytest.mark.parametrize("seed", range(40))
def test_cells_and_tensors_agree_and_pieces_do_not_overlap(seed: int):
    draw = random.Random(seed)
    weights = draw.choice(SMALL)
    sharding = random_sharding(draw, weights, 32)
    owned = {p.name: np.zeros(p.elements, np.int64) for p in weights.parameters}
    for rank in range(sharding.devices):
        cells = from_cells(sharding, weights, rank)
        count = {name: np.zeros_like(mask, np.int64) for name, mask in cells.items()}
        for tensor in sharding.tensors(weights, rank):
            used = np.zeros(int(np.prod(tensor.shape)), np.int64)
            for piece in tensor.pieces:
                at = piece.offset + piece.stride * np.arange(piece.rows)[:, None] + np.arange(piece.columns)
                used[at] += 1
                if piece.rows:
                    area = np.s_[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns]
                    count[piece.parameter][area] += 1
            assert used.max(initial=0) <= 1, tensor.name
        for name, mask in cells.items():
            assert np.array_equal(count[name], mask.astype(np.int64)), (rank, name)
            parameter = weights.parameters[weights.index[name]]
            owned[name] += mask[: parameter.rows].ravel()
    assert all(count.min() >= 1 for count in owned.values())


def tensor(sharding: Sharding, weights: ModelParameters, rank: int, name: str):
    return next(tensor for tensor in sharding.tensors(weights, rank) if tensor.name == name)


def rows(found) -> list[tuple[str, int, int]]:
    """(projection, first row, rows) in the order in which they lie in the tensor."""
    pieces = sorted(found.pieces, key=lambda piece: piece.offset)
    return [(piece.parameter.split(".")[-2], piece.row, piece.rows) for piece in pieces]


def test_megatron_fuses_heads_by_group():
    """8 heads of 4, 2 groups: 16 rows of queries, 4 of the key, 4 of the value, per group."""
    fused = tensor(MegatronSharding(Layout(tp=2)), QWEN2, 1, "decoder.layers.0.self_attention.linear_qkv.weight")
    assert fused.shape == (24, 16)
    assert rows(fused) == [("q_proj", 16, 16), ("k_proj", 4, 4), ("v_proj", 4, 4)]


def test_megatron_cuts_through_a_group_when_there_are_more_ranks_than_key_heads():
    parts = [
        rows(tensor(MegatronSharding(Layout(tp=4)), QWEN2, rank, "decoder.layers.0.self_attention.linear_qkv.weight"))
        for rank in (0, 1)
    ]
    assert parts == [[("q_proj", 0, 12)], [("q_proj", 12, 4), ("k_proj", 0, 4), ("v_proj", 0, 4)]]


def test_vllm_stacks_heads_and_repeats_key_heads():
    name = "model.layers.0.self_attn.qkv_proj.bias"
    assert tensor(VllmSharding(4), QWEN2, 1, name).shape == (16,)
    assert rows(tensor(VllmSharding(4), QWEN2, 1, name)) == [("q_proj", 8, 8), ("k_proj", 0, 4), ("v_proj", 0, 4)]
    assert rows(tensor(VllmSharding(4), QWEN2, 2, name)) == [("q_proj", 16, 8), ("k_proj", 4, 4), ("v_proj", 4, 4)]


def test_gate_and_up_lie_one_after_the_other():
    fused = tensor(MegatronSharding(Layout(tp=2)), LLAMA, 1, "decoder.layers.3.mlp.linear_fc1.weight")
    assert (fused.shape, rows(fused)) == ((64, 24), [("gate_proj", 32, 32), ("up_proj", 32, 32)])
    assert rows(tensor(VllmSharding(2), LLAMA, 1, "model.layers.3.mlp.gate_up_proj.weight")) == rows(fused)


def test_stages_may_be_uneven_and_a_tied_head_has_a_copy():
    sharding = MegatronSharding(Layout(pp=3), stages=(1, 3, 1))
    names = [[t.name for t in sharding.tensors(QWEN2, rank)] for rank in range(3)]
    blocks = [len({name.split(".")[2] for name in stage if name.startswith("decoder.layers")}) for stage in names]
    assert blocks == [1, 3, 1]
    assert names[0][0] == "embedding.word_embeddings.weight"
    assert {"decoder.final_layernorm.weight", "output_layer.weight"} <= set(names[2])
    assert "output_layer.weight" not in names[0] + names[1]


def test_a_padded_vocabulary_is_shared_out():
    local = tensor(MegatronSharding(Layout(tp=4), vocabulary=512), QWEN2, 1, "embedding.word_embeddings.weight")
    assert local.shape == (128, 16)
    assert [(piece.row, piece.rows) for piece in local.pieces] == [(128, 128)]
    assert tensor(VllmSharding(2), QWEN2, 1, "model.embed_tokens.weight").shape == (64, 16)


def test_experts_are_shared_out_within_data_parallel_ranks():
    sharding = MegatronSharding(Layout(tp=2, dp=4, ep=2))
    held = [
        {
            piece.parameter.split(".")[5]
            for t in sharding.tensors(MOE, rank)
            for piece in t.pieces
            if ".experts." in t.name
        }
        for rank in (0, 1, 2, 4)
    ]
    assert held == [set("0123"), set("0123"), set("4567"), set("0123")]
    assert (
        tensor(sharding, MOE, 2, "decoder.layers.0.mlp.experts.linear_fc1.weight1")
        .pieces[0]
        .parameter.startswith("model.layers.0.mlp.experts.5.")
    )


def test_fsdp_leaves_less_or_nothing_to_the_last_ranks():
    """As torch.chunk: 24 rows in parts of ceil(24 / 7) = 4."""
    shapes = [
        [t.shape for t in FsdpSharding(7).tensors(LLAMA, rank) if t.name == "model.norm.weight"] for rank in range(7)
    ]
    assert shapes == [[(4,)]] * 6 + [[]]


def test_experts_that_fold_tensor_ranks_in_are_refused():
    with pytest.raises(FuseError, match=r"ep=8; needs a divisor of dp\*cp=4"):
        sharding_from("megatron tp2 dp4 ep8").check(MOE)


def test_fsdp_stacks_experts():
    local = tensor(FsdpSharding(4), MOE, 1, "model.layers.0.mlp.experts.gate_up_proj")
    assert (local.shape, len(local.pieces)) == ((2, 32, 16), 4)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("megatron tp16", "tp=16"),
        ("megatron tp2 vocabulary=121", "vocabulary=121; needs a multiple of tp=2 from 120 on"),
        ("megatron pp2 stages=3+3", r"stages=\(3, 3\); needs 2 numbers that add up to 5 blocks"),
        ("vllm tp16", "tp=16"),
    ],
)
def test_a_layout_that_cannot_divide_the_model_is_refused(text: str, wrong: str):
    with pytest.raises(FuseError, match=wrong):
        sharding_from(text).check(QWEN2)


@pytest.mark.parametrize("seed", range(40))
def test_text_is_the_inverse(seed: int):
    sharding = random_sharding(random.Random(seed), QWEN3, 64)
    assert sharding_from(str(sharding)) == sharding


@pytest.mark.parametrize("text", ["megatron tp2 stages=a", "fsdp", "fsdp 0", "vllm pp2", "replicated 2x2", "ddp 4"])
def test_other_text_is_refused(text: str):
    with pytest.raises(FuseError, match=f"layout '{text}'"):
        sharding_from(text)


def test_ranks_are_different_and_as_many_as_devices():
    for ranks in ((0, 1, 1, 2), (0, 1, 2), (0, 1, 2, 3, 4), (-1, 0, 1, 2)):
        with pytest.raises(FuseError, match="needs 4 different ranks >= 0"):
            PlacedSharding(FsdpSharding(4), ranks)
    assert str(PlacedSharding(FsdpSharding(4), (3, 0, 2, 1))).endswith("on 3,0,2,1")


def test_parameters_have_the_published_count():
    """Qwen2-0.5B as published: 494,032,768; biases and norms inside attention included."""
    assert parameters_of(model_named("qwen2-0.5b"), "qwen2").elements == 494_032_768
    assert parameters_of(model_named("llama-3-8b"), "llama").elements == 8_030_261_248
    assert parameters_of(model_named("qwen3-30b-a3b"), "qwen3_moe").elements == 30_532_122_624


def test_a_family_whose_parameters_are_not_known_is_refused():
    with pytest.raises(FuseError, match="model_type='mixtral'; parameters are known for llama"):
        parameters_of(Model("m", 1, 8, 2, 2, 4, 16, 32), "mixtral")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_norms_that_have_no_name_in_megatron_are_refused(kind: str):
    weights = parameters_of(Model("m", 2, 32, 8, 2, 4, 48, 120, tied_embeddings=True), kind)
    with pytest.raises(FuseError, match=r"m: 'model.layers.0.pre_feedforward_layernorm.weight' has no name known"):
        MegatronSharding(Layout()).check(weights)
    FsdpSharding(2).check(weights)
    VllmSharding(2).check(weights)
