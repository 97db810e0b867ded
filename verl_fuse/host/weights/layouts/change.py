"""Gives an FSDP2 engine of verl another `fsdp_size` between two steps: parameters and the optimizer's moments go from
shard to shard.

Invariants (tests/integration/test_changed_layouts.py):
- afterwards the engine equals the engine that verl builds with that `fsdp_size`, and every element of a parameter and
of its moments is bitwise unchanged;
- a rank receives only the bytes it needs and does not hold; no parameter is gathered;
- optimizer, schedule of learning rates, gradient checkpointing and random numbers are not touched;
- an engine that cannot be changed is a FuseError before any change; a rank that dies or stands still ends the change on
all ranks, by name, and the engine is of no further use.
"""

import dataclasses
import gc
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from verl.utils.device import get_torch_device
from verl.utils.fsdp_utils import apply_fsdp2
from verl.workers.engine.fsdp.utils import create_device_mesh

from verl_fuse.host.weights.layouts.held import Held
from verl_fuse.host.weights.layouts.unwrap import replace_parameters, require_known, state_of, unwrap, wrapped
from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.program import BUCKET_BYTES
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.runtime.blame import Verdict
from verl_fuse.runtime.reshard.nodes import node_numbers
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse.runtime.reshard.port import open_port
from verl_fuse.runtime.reshard.stream import ParameterStream, StreamRoute
from verl_fuse.runtime.watch import Stopped, Watch


@dataclass(frozen=True)
class Moved:
    """The work of one rank: seconds of the change, bytes it received."""

    seconds: float = 0.0
    received_bytes: int = 0


class EngineLayout:
    """The layout of one engine; all ranks of the world change it together. `store` reaches all ranks, `node` names this
    rank's node."""

    def __init__(self, engine: Any, name: str, *, store: Any, node: str, options: TransferOptions) -> None:
        self._engine, self._name, self._store, self._node, self._options = engine, name, store, node, options
        self._meshes = {tuple(engine.device_mesh.mesh.shape): engine.device_mesh}
        self._changes = 0

    @property
    def fsdp_size(self) -> int:
        """Return the value as in verl's configuration."""
        return self._engine.engine_config.fsdp_size

    def change(self, fsdp_size: int, version: int) -> Moved:
        """Train in shards of `fsdp_size` ranks from here on; `version` is that of the weights, the same on all
        ranks."""
        begun = time.monotonic()
        mesh = self._mesh(fsdp_size)
        if mesh is self._engine.device_mesh:
            return Moved()
        # Tensors on their way to the host may not be read before they are there.
        get_torch_device().synchronize()
        self._changes += 1
        name, rank = f"layout {self._name} {self._changes}", dist.get_rank()
        with Watch(
            name, self._store, rank, range(dist.get_world_size()), self._options.timeout, "layout change"
        ) as watch:
            try:
                received = self._move(mesh, version, watch, PrefixStore(f"verl_fuse/{name}/port", self._store))
            except Stopped:
                raise
            except BaseException as error:
                # The other ranks would wait for this rank until their time is up.
                with suppress(Stopped):
                    watch.stop(Verdict((rank,), f"rank {rank} failed: {type(error).__name__}: {error}"))
                raise
        self._engine.device_mesh = mesh
        self._engine.engine_config = dataclasses.replace(self._engine.engine_config, fsdp_size=fsdp_size)
        return Moved(time.monotonic() - begun, received)

    def _mesh(self, fsdp_size: int) -> Any:
        """Return the mesh of a layout, made once, since each mesh has process groups of its own."""
        size = dist.get_world_size()
        shape = (size,) if fsdp_size < 0 or fsdp_size >= size else (size // fsdp_size, fsdp_size)
        if shape not in self._meshes:
            self._meshes[shape] = create_device_mesh(size, fsdp_size)
        return self._meshes[shape]

    def _move(self, mesh: Any, version: int, watch: Watch, port_store: Any) -> int:
        require_known(self._engine.module)
        held = Held(self._engine)
        nodes = node_numbers(watch, self._node)
        device = mesh.device_type
        port = open_port(port_store, watch.rank, len(watch.ranks), "gloo" if device == "cpu" else "nccl")
        received, arrived = 0, {}
        try:
            streams = []
            for weights in held.weights():
                target, dtype = placed_on(mesh), held.dtype(weights)
                route = StreamRoute(weights, held.placed, target, nodes, dtype, BUCKET_BYTES, self._options.checksums)
                streams.append((ParameterStream(self._name, route, watch.rank, port, watch, device), weights))
            held.take()
            self._rewrap(mesh)
            for stream, weights in streams:
                arrived.update(held.through(stream, weights, version))
                received += sum(report.received_bytes for report in stream.reports)
        finally:
            port.close()
        held.put(arrived)
        return received

    def _rewrap(self, mesh: Any) -> None:
        """Apply FSDP2 over `mesh` like verl; the parameters are on the meta device."""
        engine, module = self._engine, self._engine.module
        policies = state_of(wrapped(module)[0])
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": policies._mp_policy,
            "offload_policy": policies._fsdp_param_group.offload_policy,
            "reshard_after_forward": engine.engine_config.reshard_after_forward,
        }
        unwrap(module)
        whole = {
            parameter: nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
            )
            for parameter in module.parameters()
        }
        replace_parameters(module, whole)
        del whole, policies
        apply_fsdp2(module, options, engine.engine_config)
        # FSDP2's record of the old shards is a cycle of objects.
        gc.collect()


def placed_on(mesh: Any) -> PlacedSharding:
    """Return a mesh of verl's FSDP engines as a layout."""
    return PlacedSharding(
        FsdpSharding(mesh.size(-1), mesh.size(0) if mesh.ndim > 1 else 1), tuple(mesh.mesh.flatten().tolist())
    )
