"""Prompts are routed as assigned: verl's load balancer and client, over an engine that counts
(support/counting_engine.py)."""

import asyncio
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pluggy
import pytest
from omegaconf import OmegaConf

from verl_fuse import hookspecs
from verl_fuse.spec.prompts import Prediction, Prompt

ray = pytest.importorskip("ray")
pytest.importorskip("verl")
SUPPORT = Path(__file__).parent / "support"
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SUPPORT))
    from counting_engine import CountingManager, while_running
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils import tensordict_utils as tu

    from verl_fuse.errors import FuseError
    from verl_fuse.host.record.spans import Recorder, start_collector
    from verl_fuse.host.rollout import agent_errors
    from verl_fuse.host.rollout.agent_errors import AgentErrors
    from verl_fuse.host.rollout.agents import AGENT_LOOP_WORKERS
    from verl_fuse.host.rollout.client import FuseLLMServerClient
    from verl_fuse.host.rollout.finished import Finished
    from verl_fuse.host.rollout.policy import PolicyGuard
    from verl_fuse.host.rollout.prompts import (
        announce,
        announce_prompts,
        current_group,
        prompts_of,
        samples_of,
        sources_of,
    )
    from verl_fuse.host.rollout.replicas import Replicas
    from verl_fuse.host.rollout.routing import Routing
    from verl_fuse.host.rollout.waiting import Waiting
    from verl_fuse.host.upstream.rows import response_tokens

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

CONFIG = OmegaConf.create(
    {"actor_rollout_ref": {"rollout": {"prompt_length": 16, "response_length": 100, "name": "vllm"}}}
)
SAMPLES = 4
# Seconds: a load balancer of ours is a new process, which imports verl.
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def collector():
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join([str(SUPPORT), *filter(None, sys.path)])}},
    )
    yield start_collector()
    ray.shutdown()


@pytest.fixture(scope="module")
def started(collector):
    return CountingManager(3)


@pytest.fixture
def manager(started):
    started.reset()
    manager = SimpleNamespace(
        get_replicas=started.get_replicas,
        get_addresses=started.get_addresses,
        global_load_balancer=started.global_load_balancer,
        entries=started.entries,
    )
    yield manager
    if manager.global_load_balancer is not started.global_load_balancer:
        # Each test's router is a process, and one that only ends with Ray may outlive it.
        ray.kill(manager.global_load_balancer)


@pytest.fixture
def spans(collector):
    ray.get(collector.drain.remote())
    return lambda: [span for span, _ in ray.get(collector.drain.remote())]


class Policy:
    """Answers as the test says."""

    def __init__(self, homes=None, count=None):
        self.homes, self.count, self.seen, self.scaled, self.running = homes, count, [], 0, []

    @hookspecs.hookimpl
    def fuse_predict(self, prompts):
        return [Prediction(float(number), float(number)) for number, _ in enumerate(prompts)]

    @hookspecs.hookimpl
    def fuse_scale(self, prompts, replicas):
        self.scaled += 1
        return self.count

    @hookspecs.hookimpl
    def fuse_assign(self, prompts, replicas, running):
        self.seen.append((list(prompts), [replica.rank for replica in replicas]))
        self.running.append({rank: {p.uid: p.samples for p in left} for rank, left in running.items()})
        return self.homes


def guard(policy: Policy) -> PolicyGuard:
    plugins = pluggy.PluginManager("verl_fuse")
    plugins.add_hookspecs(hookspecs)
    plugins.register(policy)
    return PolicyGuard(plugins.hook)


class Routed:
    """A manager whose balancer is ours, and the client and agent-loop worker that ask it."""

    def __init__(self, manager, warm=None):
        config = SimpleNamespace(backend="naive", custom_backend_module=None)
        checkpoints = CheckpointEngineManager(config, actor_wg=None, replicas=list(manager.get_replicas()))
        self.replicas = Replicas(
            manager, checkpoints, Recorder(lambda span: None), TIMEOUT, max_num_seqs=64, sequence_tokens=116
        )
        self.routing = Routing(manager, self.replicas, TIMEOUT, SAMPLES)
        self.get_replicas = manager.get_replicas
        addresses = {address: rank for rank, address in enumerate(manager.get_addresses())}
        self.client = FuseLLMServerClient(
            CONFIG, manager.global_load_balancer, replicas=addresses, warm_prefix_tokens=warm
        )

    async def _run_prompt(self, prompt, sampling_params, trajectory, turns=1):
        """As verl's agent-loop worker: a task per sample, each with request ids of its own."""

        async def sample(number):
            prompt_ids, outputs = [1] * 8, []
            for turn in range(turns):
                name = f"{prompt['uid']}-{number}-{turn}"
                params = dict(sampling_params)
                outputs.append(await self.client.generate(name, prompt_ids=prompt_ids, sampling_params=params))
                prompt_ids = [*prompt_ids, *outputs[-1].token_ids]
            return outputs

        return await asyncio.gather(*(asyncio.create_task(sample(number)) for number in range(SAMPLES)))

    def rollout(self, uids, tokens=20, action=None, turns=1):
        """Outputs of all prompts; `action()` runs in a thread while each has some of its tokens."""
        announce_prompts(self, "run")

        async def everything():
            params = {"temperature": 1.0, "logprobs": True, "max_tokens": tokens}
            trajectory = {"step": 1, "validate": False}
            prompts = [self._run_prompt({"uid": uid}, params, trajectory=trajectory, turns=turns) for uid in uids]
            return await asyncio.gather(*map(asyncio.create_task, prompts))

        if action is None:
            return asyncio.run(everything())
        return asyncio.run(while_running(self.get_replicas(), len(uids) * SAMPLES, everything(), action))


def prompts(*uids):
    return [Prompt(uid, uid, "math", SAMPLES) for uid in uids]


def served_by(spans):
    """Tracks that served each prompt's finished requests."""
    found: dict[str, set[str]] = {}
    for span in spans:
        if span.name == "request" and span.args.get("stop_reason") == "completed":
            found.setdefault(span.args.get("prompt", ""), set()).add(span.track)
    return found


def test_all_samples_and_turns_of_a_prompt_go_where_it_was_assigned(manager, spans):
    routed = Routed(manager)
    policy = Policy({"a": 2, "b": 0, "c": 2})
    routed.routing.plan(prompts("a", "b", "c"), guard(policy))
    routed.rollout("abc", tokens=5, turns=2)
    found = spans()
    assert served_by(found) == {"a": {"replica 2"}, "b": {"replica 0"}, "c": {"replica 2"}}
    assert len(found) == 3 * SAMPLES * 2
    ((seen, ranks),) = policy.seen
    assert [prompt.prediction for prompt in seen] == [Prediction(n, n) for n in (0.0, 1.0, 2.0)]
    assert ranks == [0, 1, 2]


def finished(*keys):
    """These trajectories."""
    found = Finished()
    found.update({key: {"status": "success", "prompt_len": 2, "response_len": 5} for key in keys})
    return found


def test_views_say_what_was_assigned_and_what_is_left(manager):
    routed = Routed(manager)
    routed.routing.plan(prompts("a", "b", "c"), guard(Policy({"a": 2, "b": 0, "c": 2})))
    done = finished("a_0_0", "a_1_0", "a_1_1", "b_3_0", "stranger_0_0")
    views = routed.routing.annotate(routed.replicas.views(), done, {})
    assert [(view.assigned, view.unfinished) for view in views] == [(4, 3), (0, 0), (8, 6)]
    views = routed.routing.annotate(routed.replicas.views(), done, {"a": [5, 5, 5, 5]})
    assert [(view.assigned, view.unfinished) for view in views] == [(4, 3), (0, 0), (4, 4)], "a was discarded"


def test_prompts_that_a_running_step_asks_for_are_added_to_its_plan(manager, spans):
    """Dynamic sampling asks for more: `b` was discarded, of `a` one sample is done, and replica 0 has left with `c`."""
    routed = Routed(manager)
    policy = Policy({"a": 2, "b": 2, "c": 0}, count=3)
    policies = guard(policy)
    routed.routing.plan(prompts("a", "b", "c"), policies)
    routed.replicas.free([0], "a test")
    routed.rollout("c", tokens=5)
    moved = served_by(spans())["c"]
    policy.homes, policy.count = {"d": 1, "e": 2}, 1
    routed.routing.add(prompts("d", "e"), policies, finished("a_2_0"), {"b": [5, 5, 5, 5]})
    assert policy.scaled == 1, "the number of replicas is the step's"
    assert [[prompt.uid for prompt in seen] for seen, _ in policy.seen] == [["a", "b", "c"], ["d", "e"]]
    assert policy.running == [{}, {1: {}, 2: {"a": 3}}]
    assert routed.replicas.freed == (0,)
    routed.rollout("acde", tokens=5)
    assert served_by(spans()) == {"a": {"replica 2"}, "c": moved, "d": {"replica 1"}, "e": {"replica 2"}}
    assert set(routed.routing.prompts) == {"a", "b", "c", "d", "e"}
    # A discarded group is not waited for, an added one is.
    views = routed.routing.annotate(routed.replicas.views(), finished("a_2_0", "d_0_0"), {"b": [5, 5, 5, 5]})
    assert [(view.assigned, view.unfinished) for view in views] == [(4, 4), (4, 3), (8, 7)]
    # Of `a` nothing more comes: an agent raised.
    routed.routing.add(prompts("f"), policies, finished("a_2_0"), {}, {"a": 3})
    assert policy.running[-1] == {1: {"d": 4}, 2: {"b": 4, "e": 4}}
    routed.routing.begin_step()
    assert not routed.routing.prompts


def test_a_prompt_nobody_assigned_is_spread_as_verl_does(manager, spans):
    routed = Routed(manager)
    routed.routing.plan(prompts("a"), guard(Policy({"a": 1})))
    routed.rollout(["validation"])
    assert served_by(spans()) == {"validation": {"replica 0", "replica 1", "replica 2"}}
    routed.routing.plan(prompts("a"), guard(Policy(None)))
    routed.rollout(["a"])
    assert len(served_by(spans())["a"]) == 3, "an assignment holds until the next one"


def test_samples_of_a_replica_that_leaves_go_on_together(manager, spans):
    routed = Routed(manager)
    routed.routing.plan(prompts("a", "b", "c"), guard(Policy({"a": 0, "b": 1, "c": 1})))
    outputs = routed.rollout("abc", tokens=60, action=lambda: routed.replicas.free([0], "a test"))
    found = spans()
    assert served_by(found) == {"a": {"replica 2"}, "b": {"replica 1"}, "c": {"replica 1"}}
    assert sum("resumed_tokens" in span.args for span in found) == SAMPLES
    assert all(output.token_ids == list(range(2, 62)) for samples in outputs for (output,) in samples)


def test_a_prompt_assigned_to_a_dead_replica_is_generated_elsewhere(manager, spans):
    routed = Routed(manager)
    routed.routing.plan(prompts("a", "b"), guard(Policy({"a": 1, "b": 0})))
    server = manager.get_replicas()[1].server_handle
    routed.rollout("ab", tokens=40, action=lambda: ray.get(server.kill_engine.remote()))
    assert served_by(spans()) == {"a": {"replica 2"}, "b": {"replica 0"}}


def test_garbage_of_the_replica_a_prompt_is_assigned_to_is_found_out(collector, spans):
    manager = CountingManager(2)
    manager.reset()
    routed = Routed(manager)
    try:
        routed.routing.plan(prompts("a"), guard(Policy({"a": 1})))
        ray.get(manager.get_replicas()[1].server_handle.answer_garbage.remote())
        outputs = routed.rollout("a", tokens=5)
        assert all(output.log_probs == [-n / 1000 for n in range(2, 7)] for samples in outputs for (output,) in samples)
        assert [view.routed for view in routed.replicas.views()] == [True, False]
    finally:
        ray.kill(manager.global_load_balancer)


def test_replicas_that_are_not_needed_sleep_until_the_next_sync(manager, spans):
    routed = Routed(manager)
    policy = Policy(None, count=1)
    routed.routing.plan(prompts("a", "b"), guard(policy))
    assert policy.seen[0][1] == [0]
    assert routed.replicas.freed == (1, 2)
    slept = [entry for entry in manager.entries() if entry.startswith("sleep")]
    assert sorted(slept) == ["sleep server-1", "sleep server-2"]
    routed.rollout("ab", tokens=5)
    assert served_by(spans()) == {"a": {"replica 0"}, "b": {"replica 0"}}
    ray.get([replica.server_handle.set_global_steps.remote(3) for replica in manager.get_replicas()])
    routed.replicas.readmit(3)
    assert [view.routed for view in routed.replicas.views()] == [True] * 3


def test_a_long_prefix_is_asked_for_once_before_its_samples(manager, spans):
    routed = Routed(manager, warm=8)
    routed.routing.plan(prompts("a", "b"), guard(Policy({"a": 2, "b": 1})))
    outputs = routed.rollout("ab", tokens=6)
    found = spans()
    for uid, rank in (("a", 2), ("b", 1)):
        (warm,) = [span for span in found if span.name == "warm" and span.args["prompt"] == uid]
        assert warm.track == f"replica {rank}"
        samples = [span for span in found if span.name == "request" and span.args["prompt"] == uid]
        assert len(samples) == SAMPLES
        assert all(span.start >= warm.end for span in samples)
    assert all(len(output.token_ids) == 6 for samples in outputs for (output,) in samples)


def test_a_short_prefix_is_not_warmed(manager, spans):
    routed = Routed(manager, warm=9)
    routed.rollout("a")
    assert {span.name for span in spans()} == {"request"}


def test_the_prompts_of_later_turns_are_not_warmed(manager, spans):
    routed = Routed(manager, warm=9)
    routed.rollout("a", turns=2)
    found = spans()
    assert max(span.args["prompt_tokens"] for span in found) > 9
    assert {span.name for span in found} == {"request"}


def test_warming_at_a_dead_replica_is_not_the_samples_end(manager, spans):
    routed = Routed(manager, warm=8)
    routed.routing.plan(prompts("a"), guard(Policy({"a": 0})))
    ray.get(manager.get_replicas()[0].server_handle.kill_engine.remote())
    outputs = routed.rollout("a", tokens=6)
    assert all(len(output.token_ids) == 6 for samples in outputs for (output,) in samples)
    (warm,) = [span for span in spans() if span.name == "warm"]
    assert "EngineDeadError" in warm.args["error"]


def test_a_request_outside_a_prompt_knows_none():
    assert current_group() is None


def test_agent_loops_that_have_no_workers_are_refused_by_name():
    with pytest.raises(
        FuseError, match=r"actor_rollout_ref\.rollout\.agent\.agent_loop_manager_class: .*agent_loop_workers"
    ):
        announce(SimpleNamespace(), TIMEOUT, needed=True)
    announce(SimpleNamespace(), TIMEOUT)


class Late:
    """A balancer, or an agent-loop worker, that does not answer in time."""

    async def assign(self, homes):
        await asyncio.sleep(600)

    async def __ray_call__(self, function, *args):
        await asyncio.sleep(600)


def test_whoever_is_late_with_the_plan_of_a_step_is_named(manager):
    routed, late = Routed(manager), ray.remote(num_cpus=0)(Late).remote()
    try:
        routed.routing._router, routed.routing._waiting = late, Waiting(0.5)
        with pytest.raises(FuseError, match=r"the load balancer did not answer in 0\.5 s \(fuse\.replica_timeout\)"):
            routed.routing.plan(prompts("a"), guard(Policy({"a": 1})))
        loops = SimpleNamespace(agent_loop_workers=[late])
        with pytest.raises(FuseError, match=r"agent-loop worker 0 did not answer in 0\.5 s"):
            announce(loops, 0.5, needed=True)
    finally:
        ray.kill(late)
    with pytest.raises(FuseError, match=r"agent-loop worker 0 failed: ActorDiedError"):
        announce(loops, TIMEOUT, needed=True)


def test_response_tokens_are_counted_by_prompt_and_sample_without_padding():
    tags = {
        "a_0_0": {"response_len": 5},
        "a_0_1": {"response_len": 7},
        "a_1_0": {"response_len": 3},
        "b_0_0": {"response_len": 9},
        "c_0_0": {"response_len": 1, "is_padding": True},
    }
    assert response_tokens(tags) == {"a": [12, 3], "b": [9]}


def test_prompts_are_read_off_a_batch_with_a_key_that_lasts():
    def batch(uids):
        raw = np.array([[{"role": "user", "content": text}] for text in ("2 + 2", "3 * 3")], dtype=object)
        return tu.get_tensordict(
            {
                "uid": np.array(uids, dtype=object),
                "raw_prompt": list(raw),
                "data_source": np.array(["math", "math"], dtype=object),
            }
        )

    first, second = prompts_of(batch(["u1", "u2"]), 4), prompts_of(batch(["u3", "u4"]), 4)
    assert [prompt.uid for prompt in first] == ["u1", "u2"]
    assert [prompt.key for prompt in first] == [prompt.key for prompt in second]
    assert first[0].key != first[1].key
    assert {(prompt.source, prompt.samples) for prompt in first} == {("math", 4)}


def columns(**values):
    """A batch as verl makes it of rows with these columns."""
    return tu.get_tensordict({name: np.array([*column, None], object)[:-1] for name, column in values.items()})


def test_a_prompt_may_ask_for_samples_of_its_own():
    batch = columns(uid=["a", "b", "c", "d"], __rollout_n__=[1, np.int64(6), None, float("nan")])
    assert samples_of(batch, 4) == {"a": 1, "b": 6, "c": 4, "d": 4}
    assert [prompt.samples for prompt in prompts_of(batch, 4)] == [1, 6, 4, 4]


def test_a_value_that_is_not_of_rows_is_that_of_every_prompt():
    batch = columns(uid=["a", "b"])
    tu.assign_non_tensor_data(batch, "__rollout_n__", 3)
    tu.assign_non_tensor_data(batch, "data_source", "math")
    assert samples_of(batch, 4) == {"a": 3, "b": 3}
    assert sources_of(batch) == {"a": "math", "b": "math"}


def test_a_dead_agent_loop_worker_is_named_and_costs_the_step_nothing(collector, caplog):
    class Loop:
        def fail(self, text):
            logging.getLogger(AGENT_LOOP_WORKERS).error(text)

    loops = [ray.remote(num_cpus=0)(Loop).remote() for _ in range(2)]
    errors = AgentErrors(SimpleNamespace(agent_loop_workers=[*loops, "of another kind"]), TIMEOUT)
    errors.warn("step 1")
    ray.get(loops[0].fail.remote("no tool of this name"))
    ray.kill(loops[1])
    errors.warn("step 2", 3)
    (said,) = [record.getMessage() for record in caplog.records if record.name == agent_errors.__name__]
    assert said == (
        "step 2: 3 samples are missing and are not trained on; agent loops failed: no tool of this name (and 1 more)"
    )
    errors.warn("step 3")
    said = caplog.records[-1].getMessage()
    assert said.startswith("step 3: agent loops failed: an agent-loop worker is lost: ")
    ray.kill(loops[0])
