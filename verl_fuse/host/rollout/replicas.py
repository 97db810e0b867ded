"""The rollout replicas of a run: what each is doing, taking some out of a running rollout, and bringing them back.

Invariants (tests/integration/test_replicas.py):
- a replica is freed in the order cut routing, abort, sleep, so no request can be parked behind a closed gate;
- it is routed again only after the weight sync, once its server confirms the version of its weights;
- a replica that clients found dead is dropped from verl's checkpoint manager, and the step ends with an error naming it before the next weight
  sync, which needs every replica; with no replica left, it ends before it trains on what happened to be finished;
- one that hangs (hangs.py), cannot be freed, or does not go to sleep after the rollout is routed to no more and ended: from then on it is a dead one;
- a standalone replica (standalone/) that dies, hangs or comes back with other weights is only lost: the step and the run go on without it;
- requests that cannot move are counted before they are sent; those that meet a replica which is being freed are named
  in the log, and start again;
- every wait has a deadline, and what passes it is an error naming the replica: in the log where the step goes on, a FuseError where it cannot.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Recorder, collector
from verl_fuse.host.rollout.hangs import HangWatch, end
from verl_fuse.host.rollout.lengths import Lengths, SequenceLengths
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.watchdog import is_dead, silent_actors, weight_sync_suspects, with_deadline
from verl_fuse.spec.step import Capacity, ReplicaView
from verl_fuse.spec.timeline import Span

logger = logging.getLogger(__name__)

# Seconds between two looks at a replica that is to stop, and until it answers one.
LOOK = 2.0


class Replicas:
    """Replicas of verl's LLMServerManager, which `checkpoints`, verl's CheckpointEngineManager, puts to sleep and wakes.

    `max_num_seqs` is the engine's limit of concurrent sequences, `sequence_tokens` the longest sequence there can be, `timeout` seconds a
    replica may take to answer, or may have requests without generating a token.
    """

    def __init__(
        self,
        manager: Any,
        checkpoints: Any,
        recorder: Recorder,
        timeout: float,
        max_num_seqs: int,
        sequence_tokens: int,
    ):
        self._checkpoints = checkpoints
        self._balancer = manager.global_load_balancer
        self._replicas = {replica.replica_rank: replica for replica in manager.get_replicas()}
        self._addresses = dict(zip(self._replicas, manager.get_addresses(), strict=True))
        self._servers = {rank: replica.servers[0] for rank, replica in self._replicas.items()}
        self._recorder = recorder
        self._timeout = timeout
        self._max_num_seqs = max_num_seqs
        self._lengths = SequenceLengths(sequence_tokens)
        self._sequence_tokens = float(sequence_tokens)
        self._collector = collector()
        self._freed: tuple[int, ...] = ()
        self._dead: tuple[int, ...] = ()
        self._standalone: set[int] = set()
        self._tracks: dict[str, str] = {}
        self._capacity = self._capacities(self._replicas)
        self._hangs = HangWatch(self._replicas, timeout)

    def use_balancer(self, balancer: Any) -> None:
        """From now on `balancer` routes in place of the one verl started; both serve the same replicas."""
        self._balancer = balancer

    @property
    def devices_each(self) -> int:
        """Devices of one replica."""
        return next(iter(self._replicas.values())).world_size

    @property
    def free_rank(self) -> int:
        """The lowest rank above all there are."""
        return max(self._replicas) + 1

    @property
    def addresses(self) -> Mapping[int, str]:
        """Where each replica's server is, by rank."""
        return self._addresses

    @property
    def lost(self) -> tuple[int, ...]:
        """Standalone replicas that are dead and have not left."""
        return tuple(rank for rank in self._dead if rank in self._standalone)

    @property
    def freed(self) -> tuple[int, ...]:
        """Ranks taken out of the running rollout."""
        return self._freed

    def expect(self, unfinished: int, finished: Lengths = (), response: float | None = None) -> None:
        """From now on `unfinished` sequences are to be generated (SequenceLengths.predict): how many of them a
        replica has room for follows."""
        self._sequence_tokens = self._lengths.predict(unfinished, finished, response)

    def learn(self, lengths: Lengths) -> None:
        """Take in the lengths of a step's sequences."""
        self._lengths.learn(lengths)

    def views(self) -> tuple[ReplicaView, ...]:
        """Every replica, as the load balancer counts its requests."""
        status, counted = self._balancer.get_status.remote(), self._collector.unmovable.remote()
        running = self._get(status, "the load balancer")["servers"]
        unmovable = self._get(counted, "the collector of spans")
        for rank, address in self._addresses.items():
            if address not in running and rank not in (*self._freed, *self._dead):
                self._bury(rank)
        return tuple(
            ReplicaView(
                rank,
                running.get(address, 0),
                self._capacity[rank].room(self._sequence_tokens),
                address in running,
                standalone=rank in self._standalone,
                unmovable=unmovable.get(address, 0),
                capacity=self._capacity[rank],
            )
            for rank, address in self._addresses.items()
        )

    def watched(self) -> tuple[ReplicaView, ...]:
        """As `views`, once those are ended that have requests but have generated nothing for `timeout` seconds."""
        views = self.views()
        requests = {view.rank: view.running for view in views if view.running and view.rank not in self._dead}
        hung = self._hangs.hung(requests)
        for rank in hung:
            logger.error(
                "replica %d has %d requests, but has generated nothing for %g s (fuse.replica_timeout); it is ended",
                rank,
                requests[rank],
                self._timeout,
            )
            self._get(self._balancer.remove_servers.remote([self._addresses[rank]]), "the load balancer")
            for server in self._replicas[rank].servers:
                end(server)
        return self.views() if hung else views

    def join(self, replica: Any) -> None:
        """Take in a standalone replica; like one that was freed, it is routed once it confirms its weights (`readmit`)."""
        rank = replica.replica_rank
        self._replicas[rank], self._addresses[rank] = replica, replica.server_address
        self._servers[rank] = replica.servers[0]
        self._standalone.add(rank)
        self._tracks[f"replica {replica.server_address}"] = f"replica {rank}"
        self._freed += (rank,)
        self._capacity[rank] = Capacity(1)
        self._capacity |= self._capacities([rank])

    def named(self, span: Span) -> Span:
        """Clients know a standalone replica by its address only: here its requests get its track."""
        track = self._tracks.get(span.track)
        return span if track is None else dataclasses.replace(span, track=track)

    def leave(self, rank: int) -> None:
        """Route to a standalone replica no more, and forget it."""
        self._get(self._balancer.remove_servers.remote([self._addresses[rank]]), "the load balancer")
        self._standalone.discard(rank)
        self._freed = tuple(freed for freed in self._freed if freed != rank)
        self._dead = tuple(dead for dead in self._dead if dead != rank)
        for known in (self._replicas, self._addresses, self._servers, self._capacity):
            known.pop(rank, None)

    def lose(self, rank: int, why: str) -> None:
        """A replica is of no use any more: it is routed to no more, and for the run it is dead."""
        logger.error("replica %d %s", rank, why)
        self._get(self._balancer.remove_servers.remote([self._addresses[rank]]), "the load balancer")
        self._bury(rank)

    def _bury(self, rank: int) -> None:
        if rank in self._dead:
            return
        self._dead += (rank,)
        self._freed = tuple(freed for freed in self._freed if freed != rank)
        self._checkpoints.remove_replicas([self._replicas[rank]])
        rest = "goes on without it" if rank in self._standalone else "ends with this step"
        logger.error("replica %d is dead; its requests start again on other replicas, and the run %s", rank, rest)

    def require_alive(self) -> None:
        """Raise a FuseError naming every replica that is dead or does not answer."""
        needed = self._servers.keys() - self._standalone
        dead = [f"replica {rank}" for rank in self._dead if rank in needed]
        others = {f"replica {rank}": self._servers[rank] for rank in needed - set(self._dead)}
        found = [*dead, *silent_actors(others, self._timeout)]
        if found:
            raise FuseError(
                f"dead: {', '.join(found)}. The step is trained, on samples that other replicas finished, but the weight sync needs every "
                "replica: start the run again, it goes on from the last checkpoint"
            )

    def require_one(self, unfinished: int) -> None:
        """Raise a FuseError naming the dead replicas if none is left that could have generated the `unfinished` prompt groups."""
        if any(view.routed for view in self.views()):
            return
        freed = f"; already freed: {', '.join(f'replica {rank}' for rank in self._freed)}" if self._freed else ""
        raise FuseError(
            f"dead: {', '.join(f'replica {rank}' for rank in self._dead)}{freed}. No replica was left for {unfinished} prompt groups, so the step "
            "is not trained: start the run again, it goes on from the last checkpoint"
        )

    def suspects(self) -> list[str]:
        """Who may be holding up the rollout: replicas with requests in flight, and servers that are dead or do not answer."""
        busy = [f"replica {view.rank} ({view.running} requests in flight)" for view in self.views() if view.running]
        return [*busy, *silent_actors({f"replica {rank}": server for rank, server in self._servers.items()}, 5.0)]

    def free(self, ranks: Iterable[int], cause: str, name: str = "migrate") -> None:
        """Take replicas out of the rollout, for `cause`: their requests return to the client as partial answers, and
        their memory is given back;
        recorded as `name`."""
        chosen = tuple(ranks)
        removed = self._balancer.remove_servers.remote([self._addresses[rank] for rank in chosen])
        self._get(removed, "the load balancer")
        late = self._get(self._collector.unmovable.remote(), "the collector of spans")
        for rank in chosen:
            if count := late.get(self._addresses[rank], 0):
                logger.warning(
                    "replica %d, freed by %s, has %d requests that cannot move: they start again elsewhere, which "
                    "favours short responses a little",
                    rank, cause, count,
                )  # fmt: skip
        self._freed += chosen
        for rank, why in asyncio.run(self._done({rank: self._stop(rank, name) for rank in chosen})).items():
            self._give_up(rank, f"did not stop generating{why}")

    def all_live(self, ranks: Iterable[int]) -> bool:
        """Whether all of these live; those that do not are routed to no more. A dead replica finishes nothing, so until its clients know it looks busy."""
        dead = [rank for rank in ranks if is_dead(self._servers[rank], LOOK)]
        for rank in dead:
            self.lose(rank, "was to take over the requests of others")
        return not dead

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """While this lasts, verl's `sleep_replicas`, which an engine that dies fails or blocks, is ours."""
        self._checkpoints.sleep_replicas = self._sleep
        try:
            yield
        finally:
            del self._checkpoints.sleep_replicas

    def _sleep(self) -> None:
        ranks = self._replicas.keys() - {*self._dead, *self._standalone}
        for rank, why in asyncio.run(self._done({rank: self._replicas[rank].sleep() for rank in ranks})).items():
            self._give_up(rank, f"did not go to sleep{why}")

    def sync(self, stock: Callable[[], None], seconds: float) -> None:
        """Let `stock`, verl's call, send all their weights, within `seconds`: its sender waits for its receiver without a time limit."""
        name, suspects = "weight sync to the rollout replicas", partial(weight_sync_suspects, self._checkpoints)
        try:
            with_deadline(name, seconds, stock, suspects)
        except RayError as error:
            if not (found := suspects()):
                raise
            raise FuseError(f"{name} failed: {first_line(error)}; dead or silent: {', '.join(found)}") from error

    def readmit(self, version: int) -> None:
        """After a weight sync: let freed replicas take requests again, if they hold the weights of step `version`."""
        if not self._freed:
            return
        for rank, held in self._ask_servers(_weights_version, self._freed).items():
            if held != version:
                self._fail(
                    rank,
                    f"holds the weights of step {held} after the sync of step {version}; it cannot generate on-policy",
                )
        self._await("did not resume", {rank: self._replicas[rank].resume_generation for rank in self._freed})
        servers = {self._addresses[rank]: self._replicas[rank].server_handle for rank in self._freed}
        self._get(self._balancer.add_servers.remote(servers), "the load balancer")
        self._freed = ()

    def _give_up(self, rank: int, why: str) -> None:
        """A replica that does not stop is ended, so that its requests start again elsewhere."""
        for server in self._replicas[rank].servers:
            end(server)
        self.lose(rank, f"{why}; it is ended")

    async def _done(self, calls: Mapping[int, Coroutine]) -> dict[int, str]:
        """Of the replicas that did not do it, why. A server may wait for ever for an engine that dies meanwhile: it is asked now and then."""

        async def why(rank: int, call: Coroutine) -> tuple[int, str]:
            doing = asyncio.ensure_future(call)
            deadline = time.monotonic() + self._timeout
            try:
                while (left := deadline - time.monotonic()) > 0:
                    if (await asyncio.wait([doing], timeout=min(LOOK, left)))[0]:
                        doing.result()
                        return rank, ""
                    if await asyncio.to_thread(is_dead, self._servers[rank], LOOK):
                        return rank, ": it is dead"
                if doing.done():
                    doing.result()
                    return rank, ""
                return rank, f" in {self._timeout:g} s (fuse.replica_timeout)"
            except RayError as error:
                return rank, f": {first_line(error)}"
            finally:
                doing.cancel()

        return {rank: found for rank, found in await asyncio.gather(*map(why, calls, calls.values())) if found}

    async def _stop(self, rank: int, name: str) -> None:
        replica = self._replicas[rank]
        with self._recorder.span(name, f"replica {rank}", "other") as args:
            args["aborted_requests"] = (await replica.abort_all_requests(reject_request=True))["aborted_count"]
            await replica.sleep()

    def _await(self, failure: str, calls: Mapping[int, Callable[[], Coroutine]]) -> None:
        async def bounded(rank: int, call: Callable[[], Coroutine]) -> None:
            try:
                await asyncio.wait_for(call(), self._timeout)
            except TimeoutError:
                self._fail(rank, f"{failure} in {self._timeout:g} s (fuse.replica_timeout)")
            except RayError as error:
                self._fail(rank, f"{failure}: {first_line(error)}", error)

        async def together() -> None:
            await asyncio.gather(*(bounded(rank, call) for rank, call in calls.items()))

        asyncio.run(together())

    def _fail(self, rank: int, why: str, cause: Exception | None = None) -> None:
        """End the run for a replica that every weight sync needs; go on without a standalone one."""
        if rank not in self._standalone:
            raise FuseError(f"replica {rank} {why}") from cause
        self.lose(rank, why)

    def _capacities(self, ranks: Iterable[int]) -> dict[int, Capacity]:
        return {
            rank: Capacity(self._max_num_seqs, tokens or math.inf)
            for rank, tokens in self._ask_servers(_kv_cache_tokens, ranks).items()
        }

    def _ask_servers(self, question: Any, ranks: Iterable[int]) -> dict[int, Any]:
        """The answers, of those that answer."""
        found = {}
        for rank, answer in {rank: self._servers[rank].__ray_call__.remote(question) for rank in ranks}.items():
            try:
                found[rank] = ray.get(answer, timeout=self._timeout)
            except GetTimeoutError:
                self._fail(rank, f"did not answer in {self._timeout:g} s (fuse.replica_timeout)")
            except RayError as error:
                self._fail(rank, f"failed: {first_line(error)}", error)
        return found

    def _get(self, reference: Any, whom: str) -> Any:
        try:
            return ray.get(reference, timeout=self._timeout)
        except GetTimeoutError:
            raise FuseError(f"{whom} did not answer in {self._timeout:g} s (fuse.replica_timeout)") from None
        except RayError as error:
            raise FuseError(f"{whom} failed: {first_line(error)}") from error


def _kv_cache_tokens(server: Any) -> int | None:
    """Runs inside a server: tokens its KV cache holds; None where the engine does not say (vLLM's AsyncLLM does)."""
    cache = getattr(getattr(getattr(server, "engine", None), "vllm_config", None), "cache_config", None)
    blocks = getattr(cache, "num_gpu_blocks", None)
    return blocks * cache.block_size if cache is not None and blocks else None


def _weights_version(server: Any) -> int | None:
    """Runs inside a server: the step its weights come from."""
    return server.global_steps
