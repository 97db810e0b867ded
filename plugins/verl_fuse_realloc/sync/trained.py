"""Describes the parameters of an engine of verl as a layout of `verl_fuse.reshard`: FSDP2's here, Megatron's in a
module that needs Megatron.

Invariants (tests/integration/test_weight_sync.py, test_megatron_weight_sync.py):
- shards are read in place: no parameter is gathered or copied, and none is read before it has arrived in host memory;
- an unknown model or sharding is a FuseError naming it before any tensor is sent.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from verl.utils.device import get_torch_device

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.parameters import ModelParameters, parameters_of
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.spec.model import Model


@dataclass(frozen=True)
class Trained:
    """A trained model's parameters, and the ranks that hold each part; `device` is the type of device they are trained
    on."""

    weights: ModelParameters
    placed: PlacedSharding
    device: str


def trained(engine: Any) -> Trained:
    """Return the layout of a verl engine, after its model is built; the same on every rank."""
    config = engine.model_config.hf_config
    weights = parameters_of(Model.from_hf(config.to_dict(), config.model_type), config.model_type)
    if is_megatron(engine):
        from verl_fuse_realloc.sync import megatron

        device = next(iter(megatron.own_shards(engine).values())).device.type
        return Trained(weights, megatron.placed(engine, weights), device)
    state = engine.module.state_dict()
    # Experts are stacked.
    names = [tensor.name for tensor in FsdpSharding(1).tensors(weights, 0)]
    _check_names(weights, names, state)
    meshes = {layout_of(name, state[name]) for name in names}
    if len(meshes) > 1:
        raise FuseError(f"weight sync: parameters are sharded in {len(meshes)} ways; needs one for all of them")
    sharding, ranks = meshes.pop()
    return Trained(weights, PlacedSharding(sharding, ranks), state[weights.parameters[0].name].device_mesh.device_type)


def own_shards(engine: Any, device: int | None = None) -> dict[str, torch.Tensor]:
    """Return this rank's part of every parameter, by name; the tensors are the engine's own. Offloaded parts of
    Megatron are first brought back to their device, as verl's own sync does it; verl offloads them again. Those of FSDP
    are read in host memory, once the copies of this rank's `device` (None: the thread's) have arrived there."""
    if is_megatron(engine):
        from verl.utils.megatron_utils import load_megatron_model_to_gpu

        from verl_fuse_realloc.sync import megatron

        if engine.is_param_offload_enabled:
            load_megatron_model_to_gpu(engine.module, load_grad=False)
        return megatron.own_shards(engine)
    if engine.is_param_offload_enabled:
        # verl does not wait for its copies to the host.
        get_torch_device().synchronize(device)
    return {name: tensor.to_local().detach() for name, tensor in engine.module.state_dict().items()}


def _check_names(weights: ModelParameters, names: Collection[str], state: Mapping[str, Any]) -> None:
    # A tied head is the embedding under a second name.
    tied = {"lm_head.weight"} if weights.model.tied_embeddings else set()
    unknown = sorted(state.keys() - set(names) - tied)
    missing = sorted(set(names) - state.keys())
    if unknown or missing:
        raise FuseError(
            f"weight sync: of the model's parameters {unknown[:3]} are not known ({len(unknown)} in all), "
            f"and {missing[:3]} are missing ({len(missing)}); needs those of a plain {weights.model.name}"
        )


def layout_of(name: str, tensor: Any) -> tuple[FsdpSharding, tuple[int, ...]]:
    """Return how FSDP2 has sharded a tensor, and the ranks over which it is sharded."""
    if not isinstance(tensor, DTensor):
        raise FuseError(
            f"weight sync: parameter {name!r} is a {type(tensor).__name__}; needs FSDP2, whose are DTensors"
        )
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    ranks = tuple(mesh.mesh.flatten().tolist())
    if placements == (Shard(0),):
        return FsdpSharding(mesh.size(0)), ranks
    if placements == (Replicate(), Shard(0)):
        return FsdpSharding(mesh.size(1), mesh.size(0)), ranks
    raise FuseError(
        f"weight sync: parameter {name!r} is placed {placements}; needs (Shard(0),) or (Replicate(), Shard(0))"
    )
