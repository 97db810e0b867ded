"""Finds a Megatron model's parameters at their place in the whole model, however the model is cut: the form in which
training ranks leave weights for slices, and slices take them.

Megatron tells for each parameter whether tensor-parallel ranks share it and along which dimension. Blocks and experts
are numbered from a rank's first, gate and up of an MLP are one tensor, and the last stage has a copy of a tied head;
here each parameter has the name and the place that it has in one process. A name contains the whole shape, so that a
vocabulary that is padded otherwise is another parameter.

Among the parameters here is a buffer: the bias by which a router balances its experts, which training moves as well.

Invariants (tests/integration/test_megatron_slices.py):
- whatever tensor, pipeline and expert parallelism on either side, the parameters left by a model and taken by a copy
are the model's, bit by bit;
- each element is left by one rank.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from verl.utils.megatron_utils import unwrap_model

from verl_fuse.errors import FuseError
from verl_fuse.host.weights.shard import Shard

_BLOCK = re.compile(r"^decoder\.layers\.(\d+)\.")
# Experts in modules of their own, or grouped in one module (Transformer Engine).
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)\d*$")
_ROUTER_BIAS = ".router.expert_bias"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def held_parts(engine: Any) -> Iterator[Shard]:
    """Yield this rank's parts of the model of a Megatron engine; the data are the engine's own."""
    for part, _ in _parts(engine):
        yield part


def own_parts(engine: Any) -> Iterator[Shard]:
    """Yield the parts whose only or first holder is this rank."""
    for part, first in _parts(engine):
        if first:
            yield part


def own_bytes(engine: Any) -> int:
    """Return the bytes of `own_parts`; sizes alone are read, which offloaded parameters have as well."""
    model = gpt_model(engine)
    return sum(parameter.nbytes for own, parameter in _parameters(model) if _placed(own, parameter, model)[2])


def _parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all that training changes, under this rank's names."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(_ROUTER_BIAS):
            # As Megatron keeps it from the first pass on: a model in bfloat16 rounds it when it is built.
            buffer.data = buffer.data.float()
            yield name, buffer


def _placed(own: str, parameter: Any, model: Any) -> tuple[Any, int | None, bool]:
    """Return the group over which a parameter is cut, the dimension (None: it is whole), and whether this rank is the
    first to hold it."""
    groups = model.pg_collection
    tensor, copies = (groups.expt_tp, groups.expt_dp) if ".experts." in own else (groups.tp, groups.dp_cp)
    dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    first = copies.rank() == 0 and (dim is not None or tensor.rank() == 0) and not is_second_head(own, model)
    return tensor, dim, first


def _parts(engine: Any) -> Iterator[tuple[Shard, bool]]:
    """Yield each part, and whether this rank is the first to hold the part."""
    model = gpt_model(engine)
    for own, parameter in _parameters(model):
        tensor, dim, first = _placed(own, parameter, model)
        name = _EMBEDDING if is_second_head(own, model) else _whole_name(own, model)
        shape, offset = list(parameter.shape), [0] * parameter.dim()
        pieces = (parameter.data,)
        if dim is not None:
            shape[dim] *= tensor.size()
            gated = bool(_GATED.search(own)) and model.config.gated_linear_unit
            pieces = parameter.data.chunk(2, dim) if gated else pieces
            offset[dim] = tensor.rank() * pieces[0].shape[dim]
        for data in pieces:
            yield Shard(f"{name} of {'x'.join(map(str, shape))}", tuple(offset), data), first
            if dim is not None:
                # The up projection is after the whole gate.
                offset[dim] += shape[dim] // len(pieces)


def _whole_name(own: str, model: Any) -> str:
    """Return the name that a parameter has where one process has the whole model."""
    if (block := _BLOCK.match(own)) is not None:
        layer = model.decoder.layers[int(block[1])]
        own = f"decoder.layers.{layer.layer_number - 1}.{own[block.end() :]}"
    if (expert := _EXPERT.search(own)) is not None:
        local = model.config.num_moe_experts // model.pg_collection.ep.size()
        number = local * model.pg_collection.ep.rank() + int(expert[0])
        own = f"{own[: expert.start()]}{number}{own[expert.end() :]}"
    return own


def is_second_head(name: str, model: Any) -> bool:
    """Tell whether this is the last stage's copy of a tied head, which the first stage has."""
    return name == _HEAD and model.share_embeddings_and_output_weights


def gpt_model(engine: Any) -> Any:
    """Return this rank's part of the model; a FuseError where it is no GPTModel, or several parts."""
    if len(engine.module) != 1:
        raise FuseError(f"weights of slices: virtual_pipeline_model_parallel_size={len(engine.module)}; needs 1")
    model: Any = unwrap_model(engine.module[0])
    if not isinstance(model, GPTModel):
        raise FuseError(f"weights of slices: Megatron's {type(model).__name__}; needs a GPTModel")
    return model
