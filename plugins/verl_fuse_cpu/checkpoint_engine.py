"""The checkpoint engine `gloo` sends weights from the trainer to standalone rollout replicas, on a host without an
accelerator.

Select it with `rollout.checkpoint_engine.backend=gloo` and `custom_backend_module=verl_fuse_cpu.checkpoint_engine`;
`checkpoint_engine.engine_kwargs.gloo.timeout_seconds` (default 600) bounds every wait. Trainer rank 0
broadcasts; the other trainer ranks only take part in collecting the weights. The list of a bucket's tensors travels
through the store, its bytes through gloo.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Generator, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

import ray
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_fuse.errors import FuseError
from verl_fuse.runtime.listening import listening_store

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]
# The types of element are found by the names that they travel under.
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@CheckpointEngineRegistry.register("gloo")  # pyright: ignore[reportAttributeAccessIssue]  upstream lacks @staticmethod
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcast named tensors in buckets of about `bucket_size` bytes; a larger tensor is a bucket of its own."""

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 600.0) -> None:
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = timedelta(seconds=timeout_seconds)
        self._rank = -1
        self._world_size = 0
        # Torch's stubs know neither bytes in a store nor broadcast on a group.
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = listening_store(host, self._timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give rank 0 to the trainer, ranks 1.. to the rollout, and -1 to trainer ranks outside the group."""
        world_size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        self._rank, self._world_size = rank, world_size
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(master["host"], master["port"], is_master=False, timeout=self._timeout)
        self._store.set(f"joined/{rank}", b"1")
        try:
            self._group = ProcessGroupGloo(PrefixStore("gloo", self._store), rank, world_size, self._timeout)
        except RuntimeError as error:
            raise self._late("joined") from error

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Broadcast all weights; trainer ranks outside the group only walk the generator, which is collective over all
        of them."""
        if self._rank < 0:
            for _ in weights:
                pass
            return {}
        for number, bucket in enumerate(chain(_buckets(weights, self._bucket_size), [[]])):
            await asyncio.to_thread(self._send, number, bucket)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        number = 0
        while bucket := await asyncio.to_thread(self._receive, number):
            for item in bucket:
                yield item
            number += 1

    def _send(self, number: int, bucket: Bucket) -> None:
        """Broadcast one bucket; an empty bucket marks the end."""
        # The list is not pickled: unpickling runs any code that the sender likes.
        contents = [(name, list(tensor.shape), _NAMES[tensor.dtype], tensor.nbytes) for name, tensor in bucket]
        self._store.set(f"bucket/{number}", json.dumps(contents))
        if bucket:
            self._broadcast(torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]), number)

    def _receive(self, number: int) -> Bucket:
        try:
            contents = json.loads(self._store.get(f"bucket/{number}"))
        except RuntimeError as error:
            raise FuseError(
                f"weight sync: rollout rank {self._rank} waited {self._seconds} s for bucket {number} of trainer rank 0"
            ) from error
        if not contents:
            return []
        self._store.set(f"bucket/{number}/{self._rank}", b"1")
        sizes = [nbytes for *_, nbytes in contents]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self._broadcast(buffer, number)
        # A copy starts where its dtype may start; a slice of bytes need not.
        return [
            (name, part.clone().view(_DTYPES[dtype]).view(shape))
            for (name, shape, dtype, _), part in zip(contents, buffer.split(sizes), strict=True)
        ]

    def _broadcast(self, buffer: torch.Tensor, number: int) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise self._late(f"bucket/{number}") from error

    def _late(self, key: str) -> FuseError:
        """Return the error that names the rollout ranks which never left their mark under `key`."""
        missing = [rank for rank in range(1, self._world_size) if not self._store.check([f"{key}/{rank}"])]
        waited = f"rollout ranks {missing}" if missing else "a rank that left the transfer"
        return FuseError(
            f"weight sync: rank {self._rank} of {self._world_size} waited up to {self._seconds} s at {key} for {waited}"
        )

    @property
    def _seconds(self) -> float:
        return self._timeout.total_seconds()


def _buckets(weights: NamedTensors, size: int) -> Iterator[Bucket]:
    """Yield buckets of tensors; a bucket ends where the next tensor would exceed `size` bytes."""
    bucket: Bucket = []
    used = 0
    for name, tensor in weights:
        tensor = tensor.detach()
        if bucket and used + tensor.nbytes > size:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    if bucket:
        yield bucket
