"""The processes that hold samples beside the replicas: verl's agent-loop manager deals prompts out to actors that
generate nothing, and some of the actors die."""

import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from verl_fuse.errors import FuseError

ray = pytest.importorskip("ray")
pytest.importorskip("verl")
SUPPORT = Path(__file__).parent / "support"
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SUPPORT))
    from sample_process import Process
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.utils import tensordict_utils as tu

    from verl_fuse.host.rollout.processes import SampleProcesses

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

TIMEOUT = 1.0


@pytest.fixture(scope="module")
def actors():
    """Three agent-loop workers and two reward workers, of which a test ends some."""
    path = {"PYTHONPATH": str(SUPPORT)}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": path})
    yield [ray.remote(num_cpus=0)(Process).remote() for _ in range(5)]
    ray.shutdown()


def alive(actor):
    """The actor, or another one if it has been ended."""
    try:
        ray.get(actor.generate_sequences.remote([]))
    except ray.exceptions.RayActorError:
        return alive(ray.remote(num_cpus=0)(Process).remote())
    return actor


class Run:
    """A manager of the first three of `actors`, the others are reward workers; and a watch of its rollout."""

    def __init__(self, actors, kind=AgentLoopManagerTQ):
        self.manager = kind.__new__(kind)
        self.manager.agent_loop_workers, self.rewards = actors[:3], actors[3:]
        self.processes = SampleProcesses(self.manager, self.rewards, TIMEOUT, self.note)
        self.unfinished, self.failed = {}, 0

    def note(self, prompts):
        """Every prompt is found by the text "row UID"."""
        self.unfinished |= {uid: f"row {uid}" for uid in prompts["uid"]}

    def submit(self, *uids):
        self.manager.generate_sequences(tu.get_tensordict({"uid": np.array(uids, object)}))

    def now(self):
        return self.unfinished, self.failed

    def look(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.processes.before_wait(self)
            time.sleep(0.02)


@pytest.fixture
def run(actors):
    actors[:] = map(alive, actors)
    return Run(actors)


def end(actor):
    """Return once Ray knows that the actor is dead."""
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.exit.remote())


def test_a_dead_agent_loop_worker_is_named_with_the_prompts_that_it_had(run):
    # verl deals out five prompts to three workers: two, two and one.
    run.submit("a", "b", "c", "d", "e")
    del run.unfinished["a"]
    run.look(3 * TIMEOUT)
    end(run.manager.agent_loop_workers[1])
    with pytest.raises(
        FuseError,
        match=r"^agent-loop worker 1 is dead \(ActorDiedError: .*\): it held 2 unfinished prompt groups, for which the "
        r"rollout would wait without end: row c \(uid c\), row d \(uid d\); start the run again",
    ):
        run.look(60)


def test_a_dead_worker_without_unfinished_prompts_ends_nothing(run):
    run.submit("a", "b", "c")
    del run.unfinished["b"]
    end(run.manager.agent_loop_workers[1])
    run.look(4 * TIMEOUT)
    assert next(name for name in run.processes.suspects(run) if "dead" in name).startswith(
        "agent-loop worker 1 (dead: "
    )


def test_prompts_of_an_earlier_step_are_nobodys(run):
    run.submit("a", "b", "c")
    run.processes.forget()
    end(run.manager.agent_loop_workers[1])
    run.look(4 * TIMEOUT)


def test_many_lost_prompts_are_counted_and_a_few_are_named(run):
    run.submit(*(f"{n:02d}" for n in range(21)))
    end(run.manager.agent_loop_workers[2])
    with pytest.raises(FuseError, match=r"7 unfinished prompt groups, .*: row 14 \(uid 14\), .*row 18 \(uid 18\), …;"):
        run.look(60)


def test_a_dead_reward_worker_is_named_once_a_group_has_failed(run):
    run.submit("a")
    end(run.rewards[1])
    # Agents may score their samples themselves.
    run.look(4 * TIMEOUT)
    run.failed = 2
    with pytest.raises(
        FuseError,
        match=r"^reward worker 1 is dead \(ActorDiedError.* is to score fails, and 2 prompt groups have failed",
    ):
        run.look(60)


def test_a_process_that_does_not_answer_ends_nothing_and_is_a_suspect(run):
    run.submit("a", "b", "c")
    while run.processes.suspects(SimpleNamespace(unfinished={})):
        """A process that is new imports what it is asked for."""
    run.manager.agent_loop_workers[0].block.remote(15.0)
    run.rewards[0].block.remote(15.0)
    run.look(3 * TIMEOUT)
    del run.unfinished["b"]
    assert run.processes.suspects(run) == [
        "agent-loop worker 0 (1 prompt groups)",
        "agent-loop worker 2 (1 prompt groups)",
        "agent-loop worker 0 (does not answer)",
        "reward worker 0 (does not answer)",
    ]


def test_a_dead_worker_of_a_manager_that_deals_prompts_out_itself_is_left_to_it(actors):
    class Own(AgentLoopManagerTQ):
        def generate_sequences(self, prompts):
            return prompts

    actors[:] = map(alive, actors)
    run = Run(actors, Own)
    assert run.manager.generate_sequences({"uid": ["a"]}) == {"uid": ["a"]}
    end(actors[0])
    run.unfinished = {"a": "row a"}
    run.look(2 * TIMEOUT)
    assert next(iter(run.processes.suspects(run))).startswith("agent-loop worker 0 (dead: ")


def test_a_manager_without_workers_has_none_to_watch():
    class Own:
        def generate_sequences(self, prompts):
            return prompts

    own, told = Own(), []
    processes = SampleProcesses(own, None, TIMEOUT, told.append)
    assert own.generate_sequences([1]) == [1]
    assert told == [[1]]
    watch = SimpleNamespace(unfinished={"a": ""}, now=lambda: ({"a": ""}, 1))
    processes.before_wait(watch)
    assert processes.suspects(watch) == []
