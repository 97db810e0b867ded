"""Checkpoint engine `fuse`: brings weights from FSDP2 or Megatron training ranks to rollout replicas on other devices;
each worker gets the part it loads straight from the ranks that hold the part. verl's own engines gather every parameter
and send it whole to every worker.

Select it with `rollout.checkpoint_engine.backend=fuse` and
`custom_backend_module=verl_fuse_realloc.sync.checkpoint_engine`, in any trainer mode of verl that has standalone
replicas. `checkpoint_engine.engine_kwargs.fuse.timeout_seconds` (default 300) bounds every wait, `checksums` (default
false) adds a sum to every message. verl opens and closes the transfer around every sync, so replicas may come and go
between two syncs.

Invariants (tests/integration/test_checkpoint_engine.py):
- a worker gets the elements that vLLM loads of whole parameters, bitwise, in the rollout's type; elements that it does
not load are NaN;
- workers receive only the bytes that they load; no parameter is gathered;
- all ranks agree on the step of the weights; a worker's copy has that version only when the worker has taken
everything;
- a rank that dies, leaves early or never joins ends the sync on all ranks within the timeout, by name.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Generator
from datetime import timedelta
from types import ModuleType
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name, get_torch_device

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.on_import import on_import
from verl_fuse.host.weights.computed import TORCH_DTYPES
from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.text import sharding_from
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.runtime.listening import listening_store
from verl_fuse.runtime.reshard.nodes import node_numbers
from verl_fuse.runtime.reshard.port import open_port
from verl_fuse.runtime.reshard.stream import ParameterStream, StreamRoute
from verl_fuse.runtime.watch import Stopped, Watch
from verl_fuse.spec.model import Model
from verl_fuse_realloc.sync.hybrid import UNNUMBERED
from verl_fuse_realloc.sync.trained import own_shards, trained


@CheckpointEngineRegistry.register("fuse")  # pyright: ignore[reportAttributeAccessIssue]  upstream lacks @staticmethod
class FuseCheckpointEngine(CheckpointEngine):
    """The checkpoint engine `fuse`. Training ranks come first in a transfer, then the workers of all replicas, replica
    by replica."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 300.0, checksums: bool = False
    ) -> None:
        self._bucket_bytes, self._is_master, self._checksums = bucket_size, is_master, checksums
        self._timeout = timeout_seconds
        self._lent: tuple[Any, int, str] | None = None
        self._store: Any = None
        self._watch: Watch | None = None
        self._port: Any = None
        self._trainers = 0

    def lend(self, engine: Any, rollout: Any) -> None:
        """Lend the engine whose shards are to be sent, and verl's configuration of the rollout; called on a training
        rank before a sync."""
        self._lent = engine, rollout.tensor_model_parallel_size, rollout.dtype

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = listening_store(host, timedelta(seconds=self._timeout))
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        size = actor_wg_world_size + rollout_world_size

        def arguments(ranks: range) -> dict[str, list[Any]]:
            same = {"world_size": size, "trainers": actor_wg_world_size, "master": metadata[0]}
            return {"rank": list(ranks)} | {name: [value] * len(ranks) for name, value in same.items()}

        return arguments(range(actor_wg_world_size)), arguments(range(actor_wg_world_size, size))

    def init_process_group(self, rank: int, world_size: int, trainers: int, master: dict[str, Any]) -> None:
        self._trainers = trainers
        if self._store is None:
            limit = timedelta(seconds=self._timeout)
            self._store = TCPStore(master["host"], master["port"], is_master=False, timeout=limit)
        self._watch = Watch("sync", self._store, rank, range(world_size), self._timeout, "weight sync")
        try:
            # Every rank has joined when this call returns.
            self._nodes = node_numbers(self._watch, ray.util.get_node_ip_address())
        except Stopped as error:
            raise self._told(error) from error
        kind = get_device_name()
        # Threads have a current device of their own.
        self._device = torch.device(kind) if kind == "cpu" else torch.device(kind, get_torch_device().current_device())
        backend = "gloo" if kind == "cpu" else "nccl"
        self._port = open_port(PrefixStore("port", self._store), rank, world_size, backend)

    def finalize(self) -> None:
        if self._port is not None:
            self._port.close()
        if self._watch is not None:
            self._watch.close()
        self._port = self._watch = self._store = self._lent = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send this rank's shards; `weights`, which would gather them, is not iterated over."""
        if self._lent is None:
            raise FuseError("checkpoint engine 'fuse': no training engine was lent; needs verl's ActorRolloutRefWorker")
        version = UNNUMBERED if global_steps is None else global_steps
        return await asyncio.to_thread(self._send, *self._lent, version)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        version = UNNUMBERED if global_steps is None else global_steps
        stream = await asyncio.to_thread(self._stream)
        arriving = stream.run({}, version)
        try:
            while (found := await asyncio.to_thread(next, arriving, None)) is not None:
                yield found
        except Stopped as error:
            raise self._told(error) from error
        finally:
            # The other ranks learn now of tensors that were not taken.
            arriving.close()
        stream.held_version.require(version)

    def _send(self, engine: Any, tp: int, dtype: str, version: int) -> dict[str, Any]:
        found = trained(engine)
        if dtype not in TORCH_DTYPES:
            raise FuseError(f"weight sync: rollout.dtype={dtype!r}; needs {', '.join(TORCH_DTYPES)}")
        assert self._watch is not None, "not joined"
        if self._watch.rank == 0:
            model_type = engine.model_config.hf_config.model_type
            said = {
                "model": dataclasses.asdict(found.weights.model),
                "model_type": model_type,
                "trained": [str(found.placed.sharding), list(found.placed.ranks)],
                "tp": tp,
                "dtype": dtype,
                "bucket_bytes": self._bucket_bytes,
                "checksums": self._checksums,
            }
            self._store.set("route", json.dumps(said))
        try:
            stream = self._stream()
            for _ in stream.run(own_shards(engine, self._device.index), version):
                raise AssertionError("a training rank loads nothing")
        except Stopped as error:
            raise self._told(error) from error
        return {}

    def _stream(self) -> ParameterStream:
        """Return the stream of the transfer that rank 0 has announced."""
        watch = self._watch
        assert watch is not None, "not joined"
        with watch.program():
            watch.wait("the route", [0], lambda _: self._store.check(["route"]) or None)
        said = json.loads(self._store.get("route"))
        size, tp = len(watch.ranks), said["tp"]
        if (size - self._trainers) % tp:
            raise FuseError(f"weight sync: {size - self._trainers} rollout workers; needs replicas of {tp}")
        sharding, ranks = said["trained"]
        route = StreamRoute(
            parameters_of(Model(**said["model"]), said["model_type"]),
            PlacedSharding(sharding_from(sharding), tuple(ranks)),
            PlacedSharding.at(LoadableSharding(VllmSharding(tp, (size - self._trainers) // tp)), self._trainers),
            self._nodes,
            TORCH_DTYPES[said["dtype"]],
            said["bucket_bytes"],
            said["checksums"],
        )
        name = f"rollout worker {watch.rank - self._trainers}"
        return ParameterStream(name, route, watch.rank, self._port, watch, self._device)

    def _told(self, error: Stopped) -> FuseError:
        assert self._watch is not None, "not joined"
        size = len(self._watch.ranks)
        return FuseError(
            f"{error}; of the {size} ranks 0 to {self._trainers - 1} train, {self._trainers} to {size - 1} are rollout "
            "workers"
        )


def _lend_engines(module: ModuleType) -> None:
    """Let verl's workers lend their engines: verl hands a checkpoint engine the whole parameters; ours needs the engine
    that has the shards."""
    worker = module.ActorRolloutRefWorker
    stock = worker.update_weights

    @functools.wraps(stock)
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        if isinstance(self.checkpoint_engine, FuseCheckpointEngine):
            self.checkpoint_engine.lend(self.actor.engine, self.config.rollout)
        return await stock(self, global_steps=global_steps, mode=mode)

    worker.update_weights = update_weights


on_import("verl.workers.engine_workers", _lend_engines)
