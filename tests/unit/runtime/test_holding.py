"""The invariants in the docstrings of verl_fuse/runtime/reshard: holding, version, checksum."""

import pytest
import torch
from transfers import LLAMA, QWEN2, content, placed, tensors_of

from verl_fuse.errors import FuseError
from verl_fuse.reshard.rectangles import Rectangle
from verl_fuse.runtime.reshard.checksum import WORDS, checksum
from verl_fuse.runtime.reshard.holding import HeldTensors, check_apart
from verl_fuse.runtime.reshard.version import WeightVersion


def holding(text: str, tensors: dict[str, torch.Tensor], rank: int = 0) -> HeldTensors:
    return HeldTensors(QWEN2, placed(text, QWEN2).tensors(QWEN2, rank), f"rank {rank}", tensors)


def tensors(text: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return tensors_of(placed(text, QWEN2), QWEN2, rank, content(QWEN2))


def test_views_tile_a_rectangle_of_a_fused_tensor():
    """Rows 20 to 40 of the queries lie in two groups: 24 rows, then keys and values, then the rest."""
    held = tensors("megatron tp1")
    index = QWEN2.index["model.layers.1.self_attn.q_proj.weight"]
    views = list(holding("megatron tp1", held).views(Rectangle(index, 20, 20, 5, 30, 0)))
    assert [(row, column, tuple(view.shape)) for row, column, view in views] == [(0, 0, (4, 30)), (4, 0, (16, 30))]
    whole = content(QWEN2)["model.layers.1.self_attn.q_proj.weight"][20:40, 5:35]
    assert torch.equal(torch.cat([view for _, _, view in views]), whole)
    views[0][2].fill_(7)
    assert (held["decoder.layers.1.self_attention.linear_qkv.weight"][20:24, 5:35] == 7).all()


def test_a_rectangle_that_is_not_held_is_an_error():
    index = QWEN2.index["model.norm.weight"]
    with pytest.raises(AssertionError, match="is not all held"):
        list(holding("megatron pp2", tensors("megatron pp2")).views(Rectangle(index, 0, 48, 0, 1, 0)))


def test_tensors_that_are_not_those_of_the_layout_are_named():
    held = tensors("vllm tp2")
    held["extra"] = held.pop("model.norm.weight")
    with pytest.raises(
        FuseError, match=r"tensors 'extra' are not part of the layout, 'model.norm.weight' of the layout are missing"
    ):
        holding("vllm tp2", held)
    held["model.norm.weight"] = held.pop("extra")[:-1]
    with pytest.raises(
        FuseError, match=r"'model.norm.weight' has shape \(47,\) and strides \(1,\); needs \(48,\), contiguous"
    ):
        holding("vllm tp2", held)


def test_memory_is_not_read_and_written_at_once():
    held = tensors("megatron tp2")
    other = {name: tensor.clone() for name, tensor in tensors("vllm tp2").items()}
    check_apart(holding("megatron tp2", held), holding("vllm tp2", other))
    # The same tensor with the same content may be on both sides, with another order of its content it may not.
    check_apart(holding("megatron tp2", held), holding("megatron tp2", held))
    other["model.layers.0.self_attn.qkv_proj.weight"] = held["decoder.layers.0.self_attention.linear_qkv.weight"]
    check_apart(holding("megatron tp2", held), holding("vllm tp2", other))
    whole = tensors("megatron tp1")
    stacked = tensors("vllm tp1")
    stacked["model.layers.0.self_attn.qkv_proj.weight"] = whole["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(FuseError, match="shares memory with"):
        check_apart(holding("megatron tp1", whole), holding("vllm tp1", stacked))


def test_weights_have_no_version_while_they_are_written_and_after_a_fault():
    held_version = WeightVersion("critic", 3)
    held_version.require(3)
    with pytest.raises(FuseError, match="weights 'critic': version 4 is needed, they are of version 3"):
        held_version.require(4)
    with held_version.writing(4), pytest.raises(FuseError, match="they are incomplete"):
        held_version.require(3)
    held_version.require(4)
    with pytest.raises(ValueError, match="lost"), held_version.writing(5):
        raise ValueError("lost")
    for version in (4, 5):
        with pytest.raises(FuseError, match="they are incomplete: a transfer was not finished"):
            held_version.require(version)


@pytest.mark.parametrize("size", [1, 1000, WORDS + 3])
def test_a_changed_byte_and_exchanged_bytes_change_the_checksum(size: int):
    buffer = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    buffer[0] = 255
    before = checksum(buffer)
    assert torch.equal(before, checksum(buffer.clone()))
    for place in (0, size // 2, size - 1):
        changed = buffer.clone()
        changed[place] ^= 4
        assert not torch.equal(checksum(changed), before)
    if size > 1:
        exchanged = buffer.clone()
        exchanged[0], exchanged[-1] = buffer[-1].item(), buffer[0].item()
        assert not torch.equal(checksum(exchanged), before)


def test_a_llama_rank_of_no_layout_holds_nothing():
    assert placed("fsdp 2", LLAMA).tensors(LLAMA, 5) == ()
