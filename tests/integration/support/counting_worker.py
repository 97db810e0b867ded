"""Stands in for verl's CheckpointEngineWorker with the counting engine: takes weights and tells the server
their version. Without verl."""

from collections.abc import Iterator
from typing import Any


class _Offered:
    """A checkpoint engine that hands on its weights, like verl's checkpoint engine `naive`."""

    weights: Iterator[tuple[str, Any]]

    def send_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        self.weights = weights


class CountingWorker:
    def __init__(self, broken: bool):
        self._broken = broken
        self._server: Any = None
        self.checkpoint_engine = _Offered()
        self.loaded: dict[str, list] = {}

    async def serve(self, server: Any) -> None:
        self._server = server

    async def update_weights(self, global_steps: int) -> None:
        self.loaded = {name: tensor.tolist() for name, tensor in self.checkpoint_engine.weights}
        if self._broken:
            raise ValueError("unexpected parameter")
        await self._server.set_global_steps.remote(global_steps)

    async def weights(self) -> dict[str, list]:
        return self.loaded
