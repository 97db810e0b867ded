"""Processes on the nodes of a cluster (two_nodes.py): training ranks of a small FSDP2 model, each a slice as well."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

SOON = timedelta(seconds=120)
WIDTH = 512
LAYERS = 4


class NodeRank:
    """Ray actor: rank `rank` of `size`."""

    def __init__(self, rank: int, size: int):
        # One thread each: they share this host's cores.
        torch.set_num_threads(1)
        self._rank, self._size = rank, size

    def place(self) -> dict[str, Any]:
        """Node and address of this process, and its wall clock."""
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "address": ray.util.get_node_ip_address(), "time": time.time(), "folder": os.getcwd()}

    def listen(self) -> dict[str, list[str]]:
        """Addresses at which this process listens on the port of its store, by checkpoint engine, after the address
        that the engine names.

        A connection would not tell: another process may listen on the same port of another address.
        """
        from verl_fuse_cpu.checkpoint_engine import GlooCheckpointEngine
        from verl_fuse_realloc.sync.checkpoint_engine import FuseCheckpointEngine

        found = {}
        for engine in (FuseCheckpointEngine(1 << 20, is_master=True), GlooCheckpointEngine(1 << 20, is_master=True)):
            said = engine.prepare()
            found[type(engine).__name__] = [said["host"], *_listened(said["port"])]
            engine.finalize()
        return found

    def open_store(self) -> tuple[str, int]:
        """Where rank 0 listens for the others."""
        from verl_fuse.runtime.listening import listening_store

        self._store = listening_store(ray.util.get_node_ip_address(), SOON)
        return ray.util.get_node_ip_address(), self._store.port

    def join(self, host: str, port: int) -> None:
        """Make the model of all ranks, with other weights than the slice of this rank, which is alone."""
        from torch.distributed.device_mesh import init_device_mesh

        store = self._store if self._rank == 0 else dist.TCPStore(host, port, is_master=False, timeout=SOON)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=SOON)
        alone = init_device_mesh("cpu", (self._size, 1), mesh_dim_names=("slices", "alone"))["alone"]
        self._trained = _engine(1, init_device_mesh("cpu", (self._size,)))
        self._slice = _engine(2, alone)

    def export(self) -> Any:
        """This rank's share for slices."""
        from verl_fuse.host.weights.exports import export_weights

        return export_weights(self._trained, whole=True)

    def export_whole(self, bucket_bytes: int) -> list[Any]:
        """This rank's buckets for standalone replicas."""
        from verl_fuse.host.weights import buckets
        from verl_fuse.host.weights.exports import export_whole

        buckets.OBJECT_BYTES = bucket_bytes
        return export_whole(self._trained, self._rank, self._size)

    def load(self, export: Any) -> bool:
        """As a slice loads them; whether its weights are then those that are trained."""
        from verl_fuse.host.weights.buckets import load_parameters

        load_parameters(self._slice, map(ray.get, export.buckets), export.frozen)
        held = self._slice.module.state_dict()
        return all(torch.equal(held[name].full_tensor(), whole) for name, whole in _built(1).state_dict().items())

    def record(self) -> None:
        """A span of this process, which lasts for 0.2 seconds."""
        from verl_fuse.host.record.spans import collector, remote_recorder

        with remote_recorder().span("work", f"rank {self._rank}", "other"):
            time.sleep(0.2)
        # Spans are sent and not waited for: what is asked after one is answered after it.
        ray.get(collector().unmovable.remote())


def _built(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _engine(seed: int, mesh: Any) -> Any:
    """Return the part of verl's engine that is read."""
    from torch.distributed.fsdp import fully_shard

    module: Any = fully_shard(_built(seed), mesh=mesh)
    return SimpleNamespace(
        module=module,
        engine_config=SimpleNamespace(mixed_precision={"param_dtype": "fp32"}),
        is_param_offload_enabled=False,
        get_per_tensor_param=lambda: (((n, t.full_tensor()) for n, t in module.state_dict().items()), None),
    )


def _listened(port: int) -> list[str]:
    """Addresses at which this process listens on this port."""
    sockets = psutil.Process().net_connections("tcp")
    return [own.laddr.ip for own in sockets if own.status == psutil.CONN_LISTEN and own.laddr.port == port]
