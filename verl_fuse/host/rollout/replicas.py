"""Moves the rollout replicas of a run: some out of a running rollout, all to sleep at its end, and all back after the
weight sync.

Invariants (tests/integration/test_replicas.py):
- a replica is freed in the order cut routing, abort, sleep, so no request can be parked behind a closed gate;
- a freed replica is routed again only after the weight sync, once its server confirms the version of its weights;
- a replica that clients found dead is dropped from verl's checkpoint manager, and the step ends with an error naming it
  before the next weight sync, which needs every replica; with no replica left, the step ends before it trains on the
  samples that happen to be finished;
- a replica that hangs (hangs.py), cannot be freed, or does not go to sleep after the rollout gets no more requests and
is ended: from then on the replica is dead;
- a standalone replica (verl_fuse_elastic) that dies, hangs or comes back with other weights is only lost: the step and
  the run go on without it;
- requests that cannot move are counted before they are sent; a request that meets a replica which is being freed is
named in the log, and starts again;
- every wait has a deadline (waiting.py), and a missed deadline is an error naming the replica: in the log where the
step goes on, a FuseError where it cannot.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from ray.exceptions import RayError

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.host.rollout.replica import Replica, State
from verl_fuse.host.rollout.roster import Roster
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.vllm import weights_version
from verl_fuse.host.upstream.watchdog import weight_sync_suspects, with_deadline
from verl_fuse.spec.timeline import MIGRATE

logger = logging.getLogger(__name__)

# A weight sync brings replicas in these states (back) into the rollout.
OUTSIDE = (State.FREED, State.PARKED)


class Replicas(Roster):
    """The roster, with methods that move its replicas out of the rollout and back."""

    def free(self, ranks: Iterable[int], cause: str, name: str = MIGRATE) -> None:
        """Take replicas out of the rollout, for `cause`: their requests return to the client as partial answers, and
        their memory is given back. Recorded as `name`, from the moment at which no request is sent to them any more."""
        begun = Stopwatch()
        chosen = [self._replicas[rank] for rank in ranks]
        self._unroute(chosen)
        late = self._waiting.answer(self._collector.unmovable.remote(), "the collector of spans")
        for replica in chosen:
            if count := late.get(replica.address, 0):
                logger.warning(
                    "%s, freed by %s, has %d requests that cannot move: they start again elsewhere, which "
                    "favours short responses a little",
                    replica, cause, count,
                )  # fmt: skip
            if replica.state is not State.LOST:
                replica.state = State.FREED
        self._end_undone("did not stop generating", {replica: self._stop(replica, name, begun) for replica in chosen})

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Replace verl's `sleep_replicas` by ours within the block: an engine that dies makes verl's fail or block."""
        self._checkpoints.sleep_replicas = self._sleep
        try:
            yield
        finally:
            del self._checkpoints.sleep_replicas

    def sync(self, stock: Callable[[], None], seconds: float) -> None:
        """Let `stock`, verl's call, send all replicas their weights within `seconds`: verl's sender waits for its
        receiver without a time limit."""
        name, suspects = "weight sync to the rollout replicas", partial(weight_sync_suspects, self._checkpoints)
        try:
            with_deadline(name, seconds, stock, suspects)
        except RayError as error:
            if not (found := suspects()):
                raise
            raise FuseError(f"{name} failed: {first_line(error)}; dead or silent: {', '.join(found)}") from error

    def readmit(self, version: int) -> None:
        """Let freed replicas, and replicas that joined, take requests again after a weight sync, if they hold the
        weights of step `version`."""
        if not self._in(*OUTSIDE):
            return
        for replica, held in self._waiting.answers(weights_version, self._in(*OUTSIDE)).items():
            if held != version:
                why = f"holds the weights of step {held} after the sync of step {version}; it cannot generate on-policy"
                self._fail(replica, why)
        resuming = {replica: replica.handle.resume_generation() for replica in self._in(*OUTSIDE)}
        for replica, why in self._waiting.undone(resuming).items():
            self._fail(replica, f"did not resume{why}")
        servers = {replica.address: replica.handle.server_handle for replica in self._in(*OUTSIDE)}
        self._waiting.answer(self._manager.global_load_balancer.add_servers.remote(servers), "the load balancer")
        for replica in self._in(*OUTSIDE):
            replica.state = State.GENERATING

    def _sleep(self) -> None:
        there = self._in(State.GENERATING, State.FREED)
        sleeping = {replica: replica.handle.sleep() for replica in there if not replica.standalone}
        self._end_undone("did not go to sleep", sleeping)

    async def _stop(self, replica: Replica, name: str, begun: Stopwatch) -> None:
        with self._recorder.span_since(begun, name, str(replica), "other") as args:
            aborted = await replica.handle.abort_all_requests(reject_request=True)
            args["aborted_requests"] = aborted["aborted_count"]
            await replica.handle.sleep()

    def _end_undone(self, failure: str, calls: Mapping[Replica, Coroutine]) -> None:
        """Wait for these calls; a replica that does not stop is ended, so that its requests start again elsewhere."""
        for replica, why in self._waiting.undone(calls).items():
            replica.end()
            self.lose(replica.rank, f"{failure}{why}; it is ended")
