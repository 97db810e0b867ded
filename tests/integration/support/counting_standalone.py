"""A counting replica (counting_engine.py) with devices of its own: created by verl's worker group on a placement
group, like a standalone one."""

from typing import Any

import ray
from counting_server import CountingServer
from counting_worker import CountingWorker
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import RolloutReplica


class CountingStandalone(RolloutReplica):
    """`fault`: None, "load" (its weights cannot be loaded) or "launch" (its server does not come up)."""

    max_concurrency = 1000

    def __init__(self, rank: int, journal: Any, fault: str | None = None):
        self.replica_rank, self._journal, self._fault = rank, journal, fault
        self.world_size = self.gpus_per_replica_node = self.nnodes = 1
        self.workers, self.servers = [], []

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(cls=ray.remote(CountingWorker), broken=self._fault == "load")

    async def launch_servers(self) -> None:
        if self._fault == "launch":
            raise RuntimeError("no port left")
        self._server_address = f"standalone-{self.replica_rank}"
        arguments = self._server_address, self._journal, 0.01
        self._server_handle = ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(CountingServer).remote(
            *arguments
        )
        self.servers.append(self._server_handle)
        for worker in self.workers:
            await worker.serve.remote(self._server_handle)

    async def abort_all_requests(self, reject_request: bool = False) -> dict:
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)
