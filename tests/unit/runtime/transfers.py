"""Transfers between real processes: models, layouts, and tensors whose content says where it belongs."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from ranks import World

from verl_fuse.reshard.parameters import ModelParameters, parameters_of
from verl_fuse.reshard.program import TransferProgram, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.text import sharding_from
from verl_fuse.runtime.port import Port
from verl_fuse.runtime.reshard.port import open_port
from verl_fuse.runtime.reshard.transfer import Transfer
from verl_fuse.runtime.watch import Watch
from verl_fuse.spec.model import Model

# Heads, biases and ties of Qwen2-1.5B and LLaMA-3.2, everything else narrower; a vocabulary that no degree divides.
QWEN2 = parameters_of(Model("narrow-qwen2", 5, 48, 12, 2, 4, 280, 1187, tied_embeddings=True), "qwen2")
LLAMA = parameters_of(Model("narrow-llama", 4, 64, 32, 8, 2, 256, 1002), "llama")

Tensors = dict[str, torch.Tensor]


def placed(text: str, weights: ModelParameters, first: int = 0) -> PlacedSharding:
    """A layout from text; Megatron's vocabulary is padded to a multiple of 128 times tp."""
    if text.startswith("megatron"):
        unit = 128 * sharding_from(text).layout.tp  # pyright: ignore[reportAttributeAccessIssue]
        text += f" vocabulary={-(-weights.model.vocabulary // unit) * unit}"
    return PlacedSharding.at(sharding_from(text), first)


def content(weights: ModelParameters, version: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """All parameters, every element another number."""
    generator = torch.Generator().manual_seed(version)
    return {p.name: torch.rand(p.rows, p.columns, generator=generator).to(dtype) for p in weights.parameters}


def tensors_of(
    placed: PlacedSharding,
    weights: ModelParameters,
    rank: int,
    whole: Tensors | None,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """A rank's tensors with this content, padding 0; without content all -1, padding 0."""
    found = {}
    for local in placed.tensors(weights, rank):
        flat = torch.zeros(local.shape, dtype=dtype).view(-1)
        for piece in local.pieces:
            name, parameter = piece.parameter, weights.parameters[weights.index[piece.parameter]]
            rows = min(piece.rows, parameter.rows - piece.row)
            if rows > 0:
                view = flat.as_strided((rows, piece.columns), (piece.stride, 1), piece.offset)
                part = (
                    whole[name][piece.row : piece.row + rows, piece.column : piece.column + piece.columns]
                    if whole
                    else -1
                )
                view.copy_(part) if whole else view.fill_(part)
        found[local.name] = flat.view(local.shape)
    return found


def different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def planned(
    weights: ModelParameters,
    source: PlacedSharding,
    target: PlacedSharding,
    ranks: int,
    bucket: int = 1 << 18,
    item: int = 4,
) -> TransferProgram:
    """Four ranks a node."""
    nodes = [rank // 4 for rank in range(ranks)]
    return plan_transfer(weights, source, target, nodes=nodes, item_bytes=item, bucket_bytes=bucket)


def opened(
    world: World, name: str, timeout: float = 30.0, ranks: Sequence[int] | None = None
) -> tuple[Port, Watch, int]:
    """A port and a watch for transfers among these ranks, and this process' rank there; the name is used once."""
    members = list(range(world.size) if ranks is None else ranks)
    rank = members.index(world.rank)
    port = open_port(dist.PrefixStore(f"port {name}", world.store), rank, len(members), "gloo")
    store = dist.PrefixStore(f"watch {name}", world.store)
    return port, Watch(name, store, rank, range(len(members)), timeout, "weight transfer"), rank


def transfer(program: TransferProgram, opened: tuple[Port, Watch, int], **options) -> Transfer:
    port, watch, rank = opened
    return Transfer(program, rank, port, watch, **{"dtype": torch.float32, **options})
