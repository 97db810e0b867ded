"""Describes the parameters of a Megatron engine of verl as a layout of `verl_fuse.reshard`.

Sizes and places come from the model's own process groups: engines of one process may share the layout of the engine
that initialises first, so an engine's configuration need not describe its model.

Invariants (tests/integration/test_megatron_weight_sync.py):
- names and shapes of every tensor that this rank holds equal the layout's, or a FuseError names the first tensor that
  differs;
- virtual pipelines, context parallelism, experts cut otherwise than the rest, FP8 and pipelines cut by hand are
refused, and so are ranks in another order than Megatron's.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from verl.utils.megatron_utils import unwrap_model

from verl_fuse.errors import FuseError
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.spec.layout import Layout


def placed(engine: Any, weights: ModelParameters) -> PlacedSharding:
    """Return the layout of an engine's model; every rank finds the same layout without asking the others."""
    model = _model(engine)
    config, groups = model.config, model.pg_collection
    experts = weights.model.experts > 0
    for key, value, needed in (
        ("virtual_pipeline_model_parallel_size", len(engine.module), 1),
        ("expert_tensor_parallel_size", groups.expt_tp.size() if experts else groups.tp.size(), groups.tp.size()),
        ("context_parallel_size", groups.cp.size(), 1),
        ("fp8", config.fp8, None),
        ("pipeline_model_parallel_layout", config.pipeline_model_parallel_layout, None),
    ):
        if value != needed:
            raise FuseError(f"weight sync: {key}={value!r}; needs {needed}")
    expert_ranks = groups.ep.size() if experts else 1
    layout = Layout(tp=groups.tp.size(), pp=groups.pp.size(), dp=groups.dp.size(), ep=expert_ranks)
    stages = tuple(get_num_layers_to_build(config, pp_rank=stage) for stage in range(layout.pp))
    if min(stages) < 1:
        raise FuseError(f"weight sync: pipeline stages of {stages} blocks; needs at least one on each")
    shards = own_shards(engine)
    transformer_engine = any(name.endswith(".layer_norm_weight") for name in shards)
    sharding = MegatronSharding(layout, stages, model.vocab_size, transformer_engine)
    sharding.check(weights)
    rank = dist.get_rank()
    place = groups.tp.rank() + layout.tp * (groups.dp.rank() + layout.dp * groups.pp.rank())
    if place != rank or (experts and groups.ep.rank() != groups.dp.rank() % expert_ranks):
        raise FuseError(f"weight sync: rank {rank} has place {place} of {sharding}; needs Megatron's order of ranks")
    wanted = {tensor.name: tensor.shape for tensor in sharding.tensors(weights, rank)}
    held = {name: tuple(tensor.shape) for name, tensor in shards.items()}
    for name in sorted(wanted.keys() | held.keys()):
        if held.get(name) != wanted.get(name):
            raise FuseError(
                f"weight sync: rank {rank} has {name!r} of shape {held.get(name)}; "
                f"needs {wanted.get(name)}, as a plain {weights.model.name} in {sharding}"
            )
    return PlacedSharding.at(sharding)


def own_shards(engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by Megatron's names; the tensors are the engine's own."""
    return {name: tensor.data for name, tensor in _model(engine).named_parameters()}


def _model(engine: Any) -> GPTModel:
    model: Any = unwrap_model(engine.module[0])
    return model
