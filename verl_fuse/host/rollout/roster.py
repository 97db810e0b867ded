"""Lists the rollout replicas of a run, one record each: the state of each replica, its room, and the lost replicas."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Recorder, collector
from verl_fuse.host.rollout.hangs import HangWatch
from verl_fuse.host.rollout.lengths import NONE_FINISHED, Lengths, LengthTotals, SequenceLengths
from verl_fuse.host.rollout.replica import Replica, State
from verl_fuse.host.rollout.waiting import LOOK, WaitingForReplicas
from verl_fuse.host.upstream.vllm import kv_cache_tokens
from verl_fuse.host.upstream.watchdog import is_dead, silent_actors
from verl_fuse.spec.step import Capacity, ReplicaView
from verl_fuse.spec.timeline import Span

logger = logging.getLogger(__name__)


class Roster:
    """Replicas of verl's LLMServerManager, which `checkpoints`, verl's CheckpointEngineManager,
    puts to sleep and wakes.

    `max_num_seqs` is the engine's limit of concurrent sequences, `sequence_tokens` the longest possible sequence,
    `timeout` seconds a replica may take to answer, or may have requests without generating a token.
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
        self._manager, self._checkpoints, self._recorder = manager, checkpoints, recorder
        self._replicas = {handle.replica_rank: Replica(handle) for handle in manager.get_replicas()}
        self._timeout, self._max_num_seqs = timeout, max_num_seqs
        self._waiting = WaitingForReplicas(timeout, self._fail)
        self._lengths, self._sequence_tokens = SequenceLengths(sequence_tokens), float(sequence_tokens)
        self._collector = collector()
        # The recorded track of a standalone replica's requests, which may be read when the replica has left -> the
        # shown track.
        self._tracks: dict[str, str] = {}
        self._measure(self._replicas.values())
        self._hangs = HangWatch(self._replicas, timeout)
        # By rank: the load balancer's last count of requests, and the requests that agents gave up.
        self._counts: dict[int, int] = {}
        self._given_up: dict[int, int] = {}

    @property
    def devices_each(self) -> int:
        """Return the number of devices of one replica."""
        return next(iter(self._replicas.values())).handle.world_size

    @property
    def addresses(self) -> Mapping[int, str]:
        """Return the address of each replica's server, by rank."""
        return {rank: replica.address for rank, replica in self._replicas.items()}

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the standalone replicas that are dead and have not left."""
        return tuple(replica.rank for replica in self._in(State.LOST) if replica.standalone)

    @property
    def freed(self) -> tuple[int, ...]:
        """Return the ranks taken out of the running rollout."""
        return tuple(replica.rank for replica in self._in(State.FREED))

    def expect(self, unfinished: int, finished: LengthTotals = NONE_FINISHED, response: float | None = None) -> None:
        """Expect `unfinished` sequences to be generated from now on (SequenceLengths.predict), from which each
        replica's room follows."""
        self._sequence_tokens = self._lengths.predict(unfinished, finished, response)

    def learn(self, lengths: Lengths) -> None:
        """Take in the lengths of a step's sequences."""
        self._lengths.learn(lengths)

    def views(self) -> tuple[ReplicaView, ...]:
        """Return a view of every replica. A replica that clients have found dead is lost; a user's own router may rest
        a server that lives."""
        balancer = self._manager.global_load_balancer
        asked = {
            "the load balancer": balancer.get_status.remote(),
            "the collector of spans": self._collector.servers.remote(),
        }
        status, (unmovable, given_up, cut_off) = self._waiting.together(asked)
        running = status["servers"]
        for replica in self._in(State.GENERATING):
            if replica.address in running:
                continue
            if (dead := is_dead(replica.server, LOOK)) or replica.address in cut_off:
                if not dead:
                    # It answers garbage, and would keep its memory while the step is trained.
                    replica.end()
                self._bury(replica)
        self._counts = {rank: running.get(replica.address, 0) for rank, replica in self._replicas.items()}
        self._given_up = {rank: given_up.get(replica.address, 0) for rank, replica in self._replicas.items()}
        return tuple(
            ReplicaView(
                rank,
                self._hangs.requests(rank, self._counts[rank]),
                replica.capacity.room(self._sequence_tokens),
                replica.address in running,
                standalone=replica.standalone,
                unmovable=unmovable.get(replica.address, 0),
                capacity=replica.capacity,
            )
            for rank, replica in self._replicas.items()
        )

    def watched(self) -> tuple[ReplicaView, ...]:
        """Return the result of `views`, after ending replicas that hold requests but have generated nothing, or have
        not answered, for `timeout` seconds."""
        views, lost = self.views(), self._in(State.LOST)
        counts = {rank: count for rank, count in self._counts.items() if count and self._replicas[rank] not in lost}
        hung = [self._replicas[rank] for rank in self._hangs.hung(counts, self._given_up)]
        for replica in hung:
            logger.error(
                "%s has %d requests, but has generated nothing for %g s (fuse.replica_timeout); it is ended",
                replica, self._hangs.requests(replica.rank, counts[replica.rank]), self._timeout,
            )  # fmt: skip
            self._unroute([replica])
            replica.end()
        return self.views() if hung else views

    def join(self, handle: Any) -> None:
        """Take in a standalone replica (verl's handle); like a freed replica, it gets requests once it confirms its
        weights."""
        replica = Replica(handle, standalone=True, state=State.PARKED)
        self._replicas[replica.rank] = replica
        self._tracks[f"replica {replica.address}"] = str(replica)
        self._measure([replica])

    def named(self, span: Span) -> Span:
        """Return the span of a standalone replica's request with the replica's track: clients know such a replica by
        its address only."""
        return dataclasses.replace(span, track=self._tracks[span.track]) if span.track in self._tracks else span

    def leave(self, rank: int) -> None:
        """Stop routing to a standalone replica, and forget it."""
        self._unroute([self._replicas[rank]])
        del self._replicas[rank]

    def lose(self, rank: int, why: str) -> None:
        """Give a useless replica up: it gets no more requests, and for the run it is dead."""
        replica = self._replicas[rank]
        logger.error("%s %s", replica, why)
        self._unroute([replica])
        self._bury(replica)

    def all_live(self, ranks: Iterable[int]) -> bool:
        """Tell whether all of these replicas live; dead replicas are lost. A dead replica finishes no request, so it
        looks busy until its clients know."""
        dead = [rank for rank in ranks if is_dead(self._replicas[rank].server, LOOK)]
        for rank in dead:
            self.lose(rank, "was to take over the requests of others")
        return not dead

    def require_alive(self) -> None:
        """Raise a FuseError naming every replica that is dead or does not answer."""
        needed = [replica for replica in self._replicas.values() if not replica.standalone]
        dead = [str(replica) for replica in needed if replica.state is State.LOST]
        others = {str(replica): replica.server for replica in needed if replica.state is not State.LOST}
        if found := [*dead, *silent_actors(others, self._timeout)]:
            raise FuseError(
                f"dead: {', '.join(found)}. The step is trained, on samples that other replicas finished, but the "
                "weight sync needs every "
                "replica: start the run again, it goes on from the last checkpoint"
            )

    def require_one(self, unfinished: int) -> None:
        """Raise a FuseError naming the dead replicas if no replica is left to generate the `unfinished` prompt
        groups."""
        if any(view.routed for view in self.views()) or self._in(State.GENERATING):
            return
        dead, freed = (", ".join(map(str, self._in(state))) for state in (State.LOST, State.FREED))
        freed = f"; already freed: {freed}" if freed else ""
        raise FuseError(
            f"dead: {dead}{freed}. No replica was left for {unfinished} prompt groups, so the step "
            "is not trained: start the run again, it goes on from the last checkpoint"
        )

    def suspects(self) -> list[str]:
        """Return the suspects that may be holding up the rollout: replicas with requests in flight, and servers that
        are dead or do not answer."""
        busy = [f"replica {view.rank} ({view.running} requests in flight)" for view in self.views() if view.running]
        return [*busy, *silent_actors({str(replica): replica.server for replica in self._replicas.values()}, 5.0)]

    def _in(self, *states: State) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.state in states]

    def _unroute(self, replicas: Iterable[Replica]) -> None:
        removed = self._manager.global_load_balancer.remove_servers.remote([replica.address for replica in replicas])
        self._waiting.answer(removed, "the load balancer")

    def _bury(self, replica: Replica) -> None:
        if replica.state is State.LOST:
            return
        replica.state = State.LOST
        self._checkpoints.remove_replicas([replica.handle])
        rest = "goes on without it" if replica.standalone else "ends with this step"
        logger.error("%s is dead; its requests start again on other replicas, and the run %s", replica, rest)

    def _fail(self, replica: Replica, why: str, cause: Exception | None = None) -> None:
        """End the run for a replica that every weight sync needs; go on without a standalone replica."""
        if not replica.standalone:
            raise FuseError(f"{replica} {why}") from cause
        self.lose(replica.rank, why)

    def _measure(self, replicas: Iterable[Replica]) -> None:
        """Ask the engines for their room."""
        for replica, tokens in self._waiting.answers(kv_cache_tokens, replicas).items():
            replica.capacity = Capacity(self._max_num_seqs, tokens or math.inf)
