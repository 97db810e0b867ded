"""Brings weights from training ranks to rollout replicas on the same devices: each rank gets the part that the vLLM
worker beside it loads, straight from the ranks that hold the part. verl's own sync gathers every parameter on every
rank first.

Invariants (tests/integration/test_weight_sync.py):
- vLLM loads the same numbers as in verl's own sync;
- a rank that dies or stands still ends the sync on every rank, within the timeout, with its name; no sample is
generated with the weights loaded by then, because replicas stay asleep and the step ends with the error.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import remote_recorder
from verl_fuse.host.weights.computed import TORCH_DTYPES
from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.runtime.reshard.nodes import node_numbers
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse.runtime.reshard.port import open_port
from verl_fuse.runtime.reshard.stream import ParameterStream, StreamRoute
from verl_fuse.runtime.watch import Watch
from verl_fuse_realloc.sync.trained import own_shards, trained

# The version of a sync that verl gives no step.
UNNUMBERED = -1


def shard_sync_worker_class(base: type, options: TransferOptions) -> type:
    """Return a subclass of verl's actor worker whose sync with its own rollout sends shards."""

    @functools.wraps(base.update_weights)  # type: ignore[attr-defined]
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        # This function travels to another process by value, and must find that process's module.
        from verl_fuse_realloc.sync import hybrid

        if mode != "naive":
            return await base.update_weights(self, global_steps=global_steps, mode=mode)  # type: ignore[attr-defined]
        with hybrid.exporting(self, UNNUMBERED if global_steps is None else global_steps, options):
            return await base.update_weights(self, global_steps=global_steps, mode=mode)  # type: ignore[attr-defined]

    return type(f"ShardSync{base.__name__}", (base,), {"__doc__": base.__doc__, "update_weights": update_weights})


@contextmanager
def exporting(worker: Any, version: int, options: TransferOptions) -> Iterator[None]:
    """Let the actor's engine export the part that this rank's vLLM worker loads, within the block; raise an error if a
    part was not taken."""
    engine, rollout = worker.actor.engine, worker.config.rollout
    stream = worker.__dict__.get("_verl_fuse_stream")
    if stream is None:
        engines = VllmSharding(
            rollout.tensor_model_parallel_size, worker.world_size // rollout.tensor_model_parallel_size
        )
        bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        node = ray.util.get_node_ip_address()
        store: Any = PrefixStore("verl_fuse/sync", dist.distributed_c10d._get_default_store())
        stream = open_stream(
            engine, engines, TORCH_DTYPES[rollout.dtype], bucket, store=store, node=node, options=options
        )
        worker._verl_fuse_stream = stream
    arriving = stream.run(own_shards(engine), version)
    engine.get_per_tensor_param = lambda **_: (arriving, None)
    with remote_recorder().span("shards", f"rank {worker.rank}", "sync", version=version) as seen:
        try:
            yield
        finally:
            del engine.get_per_tensor_param
            # The other ranks learn now of tensors that vLLM did not take.
            arriving.close()
        stream.held_version.require(version)
        seen["received_bytes"] = sum(report.received_bytes for report in stream.reports)


def open_stream(
    engine: Any,
    engines: VllmSharding,
    dtype: torch.dtype,
    bucket_bytes: int,
    *,
    store: Any,
    node: str,
    options: TransferOptions,
) -> ParameterStream:
    """Return a stream from the training ranks to `engines`; rank i serves rank i of `engines`. `store` reaches all
    ranks, `node` names this rank's node. Collective over all training ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if engines.devices != size:
        raise FuseError(
            f"weight sync: replicas {engines} have {engines.devices} ranks, training has {size}; needs as many"
        )
    found = trained(engine)
    watch = Watch("weight sync", store, rank, range(size), options.timeout, "weight sync")
    nodes = node_numbers(watch, node)
    route = StreamRoute(
        found.weights,
        found.placed,
        PlacedSharding.at(LoadableSharding(engines)),
        nodes,
        dtype,
        bucket_bytes,
        options.checksums,
    )
    port_store = PrefixStore("verl_fuse/weight sync/port", store)
    port = open_port(port_store, rank, size, "gloo" if found.device == "cpu" else "nccl")
    return ParameterStream(f"rollout rank {rank}", route, rank, port, watch, found.device)
