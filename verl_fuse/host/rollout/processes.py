"""Watches the processes that hold samples beside the replicas: verl's agent-loop workers and reward workers.

verl waits without end for the prompts of an agent-loop worker that has died, and every sample that it sends to a dead
reward worker fails. The processes are asked at intervals, and no caller waits for an answer: a process that is busy, or
cannot be reached for a while, answers later; only Ray's word that an actor has died ends the run.

Invariants (tests/integration/test_sample_processes.py):
- a dead agent-loop worker with unfinished prompts ends the run, with an error that names the worker and the prompts,
within `timeout` seconds; one whose prompts are finished does not;
- a dead reward worker ends the run likewise once a group has failed: agents may score their samples themselves;
- a manager that deals prompts out in a way of its own is left alone;
- a process that lives but does not answer ends nothing; it is among the suspects of a rollout that stands still.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.hangs import INTERVAL
from verl_fuse.host.rollout.prompts import shown
from verl_fuse.host.rollout.watch import RolloutObserver, RolloutWatch
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.vllm import fault
from verl_fuse.host.upstream.watchdog import silent_actors

logger = logging.getLogger(__name__)


class SampleProcesses(RolloutObserver):
    """The agent-loop workers of verl's `agent_loop_manager`, where it has any, and the reward workers `rewards`;
    `timeout` is seconds until a death is known, `on_submit(prompts)` is called once prompts are dealt out."""

    def __init__(
        self,
        agent_loop_manager: Any,
        rewards: Collection[Any] | None,
        timeout: float,
        on_submit: Callable[[TensorDict], None],
    ):
        loops = getattr(agent_loop_manager, "agent_loop_workers", None) or ()
        self._loops = {f"agent-loop worker {n}": loop for n, loop in enumerate(loops) if isinstance(loop, ActorHandle)}
        self._rewards = {f"reward worker {n}": worker for n, worker in enumerate(rewards or ())}
        self._interval, self._next = min(INTERVAL, timeout / 5), 0.0
        self._asked: dict[ray.ObjectRef, str] = {}
        # Dead processes, with the reason.
        self._died: dict[str, str] = {}
        # Prompt uid -> its agent-loop worker.
        self._homes: dict[str, str] = {}
        # A manager that deals prompts out itself may also know what to do when a worker dies.
        own = getattr(type(agent_loop_manager), "generate_sequences", None)
        stock = own is AgentLoopManagerTQ.generate_sequences
        self._on_submit, self._dealt = on_submit, len(self._loops) if stock else 0
        agent_loop_manager.generate_sequences = partial(self._submit, agent_loop_manager.generate_sequences)

    def forget(self) -> None:
        self._homes = {}

    def before_wait(self, watch: RolloutWatch) -> None:
        """Raise a FuseError if a process has died that the run needs."""
        answered = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in answered:
            name = self._asked.pop(reference)
            try:
                ray.get(reference)
            except ActorDiedError as error:
                self._died[name] = first_line(error)
                logger.warning("%s is dead (%s)", name, self._died[name])
            except RayError:
                continue  # It cannot be reached now, and is asked again.
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._interval
            known = {*self._asked.values(), *self._died}
            actors = {**self._loops, **self._rewards}
            # Any answer will do; the question must import nothing in a process that scores.
            self._asked |= {actors[name].__ray_call__.remote(fault): name for name in actors.keys() - known}
            if self._died:
                self._judge(*watch.now())

    def suspects(self, watch: RolloutWatch) -> list[str]:
        """Return the agent-loop workers with unfinished prompts, and processes that are dead or do not answer."""
        left = Counter(self._homes[uid] for uid in watch.unfinished if uid in self._homes)
        busy = [f"{name} ({count} prompt groups)" for name, count in sorted(left.items())]
        return [*busy, *silent_actors({**self._loops, **self._rewards}, 5.0)]

    def _submit(self, generate: Callable[[TensorDict], Any], prompts: TensorDict) -> Any:
        """Note whose prompts these are, as verl deals them out (agent_loop_tq.py `generate_sequences`): once they are
        on their way, because it takes tenths of a second for thousands of them."""
        answer = generate(prompts)
        self._on_submit(prompts)
        parts = prompts.select("uid").chunk(self._dealt) if self._dealt else ()
        for name, part in zip(self._loops, parts, strict=False):
            self._homes |= dict.fromkeys(map(str, part["uid"]), name)
        return answer

    def _judge(self, unfinished: Mapping[str, str], failed: int) -> None:
        again = "start the run again, it goes on from the last checkpoint"
        for name, why in self._died.items():
            if name in self._rewards and failed:
                raise FuseError(
                    f"{name} is dead ({why}): every sample that it is to score fails, and {failed} prompt groups have "
                    f"failed; {again}"
                )
            lost = {uid: place for uid, place in unfinished.items() if self._homes.get(uid) == name}
            if lost:
                raise FuseError(
                    f"{name} is dead ({why}): it held {len(lost)} unfinished prompt groups, for which the rollout "
                    f"would wait without end: {shown(lost)}; {again}"
                )
