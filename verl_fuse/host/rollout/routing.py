"""Assigns each prompt to a replica: a plugin chooses once per step for the whole batch, and the load balancer keeps the
choice for every request. Prompts that a running step asks for later (dynamic sampling, failed groups) are added to its
plan.

Invariants (tests/integration/test_routing.py):
- all samples of an assigned prompt go to one replica, and so do their later turns; the prefix is computed once;
- when that replica leaves the rollout, the unfinished samples go on together at the least busy replica that is left;
- a prompt without an assignment, validation included, is routed by verl;
- an assignment holds until the next step's assignment;
- prompts added to a running step leave the number of replicas and all assignments as they are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray
from tensordict import TensorDict
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_fuse.host.rollout.finished import Finished
from verl_fuse.host.rollout.left import SamplesLeft
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.prompts import prompts_of
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.rollout.waiting import Waiting
from verl_fuse.host.rollout.watch import RolloutWatch
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import ReplicaView


class PromptRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, which first looks up the assignment of the request's prompt."""

    def __init__(self, servers: dict[str, Any]):
        super().__init__(servers)
        self._homes: dict[str, str] = {}

    def assign(self, homes: dict[str, str]) -> None:
        """Set prompt uid -> server address, in place of the last step's assignment."""
        self._homes = dict(homes)

    def add(self, homes: dict[str, str]) -> None:
        """Add these homes to the existing homes: a home that was left is not given back."""
        self._homes |= homes

    def require_acquire_fields(self) -> list[str]:
        """Return the facts that a client tells of a request beside its id."""
        return ["prompt_uid"]

    def acquire_server(self, request_id: str, prompt_uid: str | None = None) -> tuple[str, Any]:
        """Return (address, handle) of the server for this request."""
        home = self._homes.get(prompt_uid) if prompt_uid is not None else None
        if prompt_uid is None or home is None:
            return super().acquire_server(request_id)
        if home not in self._servers:
            # A new request id has no server to stick to: the least busy server is chosen.
            home, handle = super().acquire_server(f"prompt {prompt_uid} leaving {home}")
            self._homes[prompt_uid] = home
            return home, handle
        self._inflight_requests[home] += 1
        return home, self._servers[home]


class ReplicaPool(Protocol):
    """Replicas with devices of their own, `most` at a time."""

    most: int

    def want(self, count: int) -> None:
        """Ask for `count` replicas from now on."""


class Routing:
    """The routing plan of each step, made with the plugins' policies; a prompt without a number of its own gets
    `samples` samples, `timeout` is seconds an actor may take to answer."""

    # Requests are routed by their prompt, which they must know.
    by_prompt = True

    def __init__(self, manager: Any, replicas: Replicas, timeout: float, samples: int):
        self._samples = samples
        servers = {replica.server_address: replica.server_handle for replica in manager.get_replicas()}
        self._router: Any = ray.remote(num_cpus=0)(PromptRouter).remote(servers)
        # All code takes the balancer from this attribute; clients are made later.
        manager.global_load_balancer = self._router
        self._replicas = replicas
        self._pool: ReplicaPool | None = None
        self._waiting = Waiting(timeout)
        self._homes: dict[str, int] = {}
        self._prompts: dict[str, Prompt] = {}
        self._left = SamplesLeft(self._prompts, self._homes)

    def use_pool(self, pool: ReplicaPool) -> None:
        """Let `pool` create missing replicas, and destroy unwanted ones."""
        self._pool = pool

    @property
    def prompts(self) -> Mapping[str, Prompt]:
        """Return the prompts of the step by uid, with their predictions."""
        return self._prompts

    def begin_step(self) -> None:
        """Begin a step without a plan."""
        self._homes, self._prompts = {}, {}
        self._left = SamplesLeft(self._prompts, self._homes)

    def submit(self, batch: TensorDict, policy: PolicyGuard, watch: RolloutWatch, ended: Collection[str] = ()) -> None:
        """Plan the step's first prompts before they are submitted; add later prompts to the plan."""
        begins, prompts = not self._prompts, prompts_of(batch, self._samples)
        if begins:
            self.plan(prompts, policy)
        else:
            self.add(prompts, policy, watch.finished, watch.discarded, ended)

    def plan(self, prompts: Sequence[Prompt], policy: PolicyGuard) -> None:
        """Plan the step's prompts before they are submitted: predict lengths, choose the number of replicas, put the
        other replicas to sleep, assign the prompts."""
        prompts = _predicted(prompts, policy)
        self.begin_step()
        self._assign(prompts, policy, self._scaled(prompts, self._routed(), policy), {}, self._router.assign)

    def add(
        self,
        prompts: Sequence[Prompt],
        policy: PolicyGuard,
        finished: Finished,
        discarded: Collection[str],
        ended: Collection[str] = (),
    ) -> None:
        """Add prompts to a running step before they are submitted: predict their lengths, and assign them beside the
        unfinished prompts. Samples of the step's other prompts are `finished`; `discarded` groups are over, and nothing
        more comes of those that have `ended`."""
        prompts = _predicted(prompts, policy)
        routed = self._routed()
        running: dict[int, list[Prompt]] = {view.rank: [] for view in routed}
        self._left.look(finished, discarded, ended)
        for uid, rank in self._homes.items():
            if rank in running and (left := self._left.of(uid)):
                running[rank].append(replace(self._prompts[uid], samples=left))
        self._assign(prompts, policy, routed, running, self._router.add)

    def _assign(
        self,
        prompts: Sequence[Prompt],
        policy: PolicyGuard,
        routed: Sequence[ReplicaView],
        running: Mapping[int, Sequence[Prompt]],
        tell: Any,
    ) -> None:
        """Let the policy choose among `routed`, and `tell` the router."""
        homes = dict(policy.assign(prompts, routed, running) or {})
        self._homes |= homes
        self._prompts |= {prompt.uid: prompt for prompt in prompts}
        self._left = SamplesLeft(self._prompts, self._homes)
        addresses = self._replicas.addresses
        told = tell.remote({uid: addresses[rank] for uid, rank in homes.items()})
        self._waiting.answer(told, "the load balancer")

    def _routed(self) -> list[ReplicaView]:
        return [view for view in self._replicas.views() if view.routed]

    def _scaled(
        self, prompts: Sequence[Prompt], routed: Sequence[ReplicaView], policy: PolicyGuard
    ) -> Sequence[ReplicaView]:
        """Return the replicas that take requests and generate the step."""
        needed = sum(not view.standalone for view in routed)
        most = len(routed) if self._pool is None else needed + self._pool.most
        count = policy.scale(prompts, routed, most)
        if count is None:
            return routed
        if parked := [view.rank for view in routed[count:] if not view.standalone]:
            self._replicas.free(parked, "fuse.elastic.scale")
        if self._pool is not None:
            self._pool.want(max(0, count - needed))
        return routed[:count]

    def upper_response(
        self, finished: Finished, discarded: Collection[str], ended: Collection[str] = ()
    ) -> float | None:
        """Return the mean of the upper predictions of the samples that are not `finished`, without `discarded` groups
        and those that have `ended`; None where a prediction is missing."""
        self._left.look(finished, discarded, ended)
        return self._left.upper

    def annotate(
        self,
        views: Iterable[ReplicaView],
        finished: Finished,
        discarded: Collection[str],
        ended: Collection[str] = (),
    ) -> tuple[ReplicaView, ...]:
        """Return `views` with the work assigned to each replica, without `discarded` groups, and the part of the work
        that the `finished` samples, and groups that have `ended` without all of theirs, leave."""
        left = self._left
        left.look(finished, discarded, ended)
        return tuple(replace(v, assigned=left.assigned[v.rank], unfinished=left.unfinished[v.rank]) for v in views)


def _predicted(prompts: Sequence[Prompt], policy: PolicyGuard) -> Sequence[Prompt]:
    predictions = policy.predict(prompts)
    if predictions is None:
        return prompts
    return [replace(p, prediction=found) for p, found in zip(prompts, predictions, strict=True)]
