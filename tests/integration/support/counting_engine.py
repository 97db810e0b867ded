"""A rollout engine that counts: behind verl's replica interface, without a model. Its answers do not depend on
where a request is resumed.

The token after t is t + 1, its log-prob -(t + 1) / 1000, so a response put together from parts equals the unbroken one.
Every call that matters is written to a journal, in the order in which it happened.
"""

import asyncio
import math
from typing import Any

import ray
from counting_server import CountingServer, Journal
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.router import GlobalRequestLoadBalancer


async def while_running(replicas: Any, requests: int, rollout: Any, action: Any, tokens: int = 10) -> Any:
    """Return what the coroutine `rollout` does. `action()` runs in a thread, as the trainer's does, once each of its
    `requests` has so many tokens and before any has another."""

    async def on_servers(method: str, *args: Any) -> list[Any]:
        calls = [getattr(replica.server_handle, method).remote(*args) for replica in replicas]
        return await asyncio.gather(*calls, return_exceptions=True)  # the action may have ended a server

    await on_servers("pause_at", tokens)
    running = asyncio.create_task(rollout)
    async with asyncio.timeout(60):
        while sum(await on_servers("paused")) < requests:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(action)
    await on_servers("pause_at", math.inf)
    return await running


class JournalledBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer, writing down when its servers change."""

    def __init__(self, servers: dict[str, Any], journal: Any):
        super().__init__(servers)
        self._journal = journal

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        ray.get(self._journal.add.remote(f"unrouted {','.join(sorted(server_ids))}"))

    def add_servers(self, servers: dict[str, Any]) -> None:
        super().add_servers(servers)
        ray.get(self._journal.add.remote(f"routed {','.join(sorted(servers))}"))


class CountingReplica(RolloutReplica):
    """A replica of one counting server, at address `server-RANK`."""

    max_concurrency = 1000

    def __init__(self, rank: int, journal: Any, step_seconds: float, max_concurrency: int):
        self.replica_rank, self.max_concurrency, self.world_size = rank, max_concurrency, 1
        self._server_address = f"server-{rank}"
        self._arguments = self._server_address, journal, step_seconds
        self.start()

    def start(self) -> None:
        """Start a server, a new one if there was one."""
        self.servers = [
            ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(CountingServer).remote(*self._arguments)
        ]
        self._server_handle = self.servers[0]

    async def launch_servers(self) -> None:
        """The server is up."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict:
        (result,) = await asyncio.gather(
            *[s.abort_all_requests.remote(reject_request=reject_request) for s in self.servers]
        )
        return result


class CountingManager:
    """The part of verl's LLMServerManager that trainers use, over counting replicas."""

    def __init__(self, count: int, step_seconds: float = 0.01, max_concurrency: int = 1000):
        self.journal = ray.remote(num_cpus=0)(Journal).remote()
        self._replicas = [CountingReplica(rank, self.journal, step_seconds, max_concurrency) for rank in range(count)]
        servers = {replica.server_address: replica.server_handle for replica in self._replicas}
        self.global_load_balancer = ray.remote(num_cpus=0)(JournalledBalancer).remote(servers, self.journal)

    def get_replicas(self) -> list[CountingReplica]:
        return self._replicas

    def get_addresses(self) -> list[str]:
        return [replica.server_address for replica in self._replicas]

    def entries(self) -> list[str]:
        return ray.get(self.journal.entries.remote())

    def revive(self, step_seconds: float, sequence_seconds: float) -> None:
        """As `reset`, with this pace, and with new servers for those that are gone."""
        for replica in self._replicas:
            try:
                ray.get(replica.server_handle.reopen.remote(step_seconds, sequence_seconds))
            except ray.exceptions.RayActorError:
                replica.start()
                ray.get(replica.server_handle.reopen.remote(step_seconds, sequence_seconds))
        self._route_all()

    def reset(self) -> None:
        """All servers open and routed, nothing in the journal."""
        ray.get([replica.server_handle.reopen.remote() for replica in self._replicas])
        self._route_all()

    def reroute(self) -> None:
        """Forget which requests are in flight: there are none."""
        ray.get(self.global_load_balancer.remove_servers.remote(self.get_addresses()))
        self._route_all()

    def _route_all(self) -> None:
        servers = {replica.server_address: replica.server_handle for replica in self._replicas}
        ray.get(self.global_load_balancer.add_servers.remote(servers))
        ray.get(self.global_load_balancer.clear_sticky_cache.remote())
        ray.get(self.journal.clear.remote())
