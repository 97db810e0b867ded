"""Replicas leave and rejoin a running rollout: verl's load balancer, replica interface and client,
over an engine that counts."""

import asyncio
import re
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError

ray = pytest.importorskip("ray")
pytest.importorskip("verl")
SUPPORT = Path(__file__).parent / "support"
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SUPPORT))
    from counting_engine import CountingManager, while_running
    from ray.exceptions import ActorUnavailableError
    from verl.checkpoint_engine.base import CheckpointEngineManager

    from verl_fuse.host.record.spans import Recorder, start_collector
    from verl_fuse.host.rollout import client as rollout_client
    from verl_fuse.host.rollout import prompts
    from verl_fuse.host.rollout.client import FuseLLMServerClient
    from verl_fuse.host.rollout.lengths import LengthTotals
    from verl_fuse.host.rollout.prompts import PromptGroup
    from verl_fuse.host.rollout.replicas import Replicas
    from verl_fuse.host.upstream.watchdog import is_dead
    from verl_fuse.spec.step import Capacity, ReplicaView, RolloutView
    from verl_fuse_interstage.migration import Trigger, tail_migration

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

CONFIG = OmegaConf.create(
    {"actor_rollout_ref": {"rollout": {"prompt_length": 16, "response_length": 100, "name": "vllm"}}}
)
SAMPLING = {"temperature": 1.0, "logprobs": True}


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
    manager = CountingManager(3)
    manager.reset()
    return manager


@pytest.fixture
def manager(started):
    started.reset()
    return started


@pytest.fixture
def spans(collector):
    ray.get(collector.drain.remote())
    return lambda: [span for span, _ in ray.get(collector.drain.remote())]


def replicas_of(manager, timeout=20.0):
    return Replicas(
        manager, checkpoints_of(manager), Recorder(lambda span: None), timeout, max_num_seqs=64, sequence_tokens=116
    )


def checkpoints_of(manager):
    config = SimpleNamespace(backend="naive", custom_backend_module=None)
    return CheckpointEngineManager(config, actor_wg=SimpleNamespace(workers=[]), replicas=list(manager.get_replicas()))


def client_of(manager):
    addresses = {address: rank for rank, address in enumerate(manager.get_addresses())}
    return FuseLLMServerClient(CONFIG, manager.global_load_balancer, replicas=addresses)


async def generate(client, count, tokens=60, **sampling):
    params = {**SAMPLING, "max_tokens": tokens, **sampling}
    requests = [client.generate(f"request-{n}", prompt_ids=[1, 1000 * n], sampling_params=params) for n in range(count)]
    return await asyncio.gather(*requests)


def while_generating(manager, count, action, **kwargs):
    """All outputs of `count` requests, each of which has some of its tokens while `action()` runs."""
    rollout = generate(client_of(manager), count, **kwargs)
    return asyncio.run(while_running(manager.get_replicas(), count, rollout, action))


def unbroken(n, tokens=60):
    return list(range(1000 * n + 1, 1000 * n + 1 + tokens))


def test_requests_of_freed_replicas_go_on_elsewhere_as_if_nothing_had_happened(manager, spans):
    replicas = replicas_of(manager)
    outputs = while_generating(manager, 9, lambda: replicas.free([0, 2], "a test"))
    for n, output in enumerate(outputs):
        assert output.token_ids == unbroken(n)
        assert output.log_probs == [-token / 1000 for token in unbroken(n)]
        assert output.stop_reason == "completed"
    requests = [span for span in spans() if span.name == "request"]
    aborted = [span for span in requests if span.args["stop_reason"] == "aborted"]
    assert len(aborted) == 6
    assert {span.track for span in aborted} == {"replica 0", "replica 2"}
    resumed = [span for span in requests if "resumed_tokens" in span.args]
    assert {span.track for span in resumed} == {"replica 1"}
    assert [span.args["prompt_tokens"] - span.args["resumed_tokens"] for span in resumed] == [2] * 6
    assert replicas.freed == (0, 2)


def test_a_replica_is_unrouted_then_aborted_then_put_to_sleep(manager):
    replicas_of(manager).free([1], "a test")
    assert manager.entries() == ["unrouted server-1", "abort server-1 reject", "sleep server-1"]


def test_a_request_that_arrives_behind_the_closed_gate_goes_elsewhere(manager):
    class Late(FuseLLMServerClient):
        async def _acquire_server(self, request_id, **extra):
            acquired = await super()._acquire_server(request_id, **extra)
            arrived.append(request_id)
            async with asyncio.timeout(60):
                await closed.wait()
            return acquired

    async def run():
        running = asyncio.create_task(generate(client, 3, tokens=5))
        async with asyncio.timeout(60):
            while len(arrived) < 3:
                await asyncio.sleep(0.02)
        await asyncio.to_thread(replicas_of(manager).free, [0, 1], "a test")
        closed.set()
        return await running

    arrived, closed = [], asyncio.Event()

    addresses = {address: rank for rank, address in enumerate(manager.get_addresses())}
    client = Late(CONFIG, manager.global_load_balancer, replicas=addresses)
    outputs = asyncio.run(run())
    assert [output.token_ids for output in outputs] == [unbroken(n, 5) for n in range(3)]


STUCK = {"seed": 7, "stop": ["x"]}


async def slow_down(manager, factor):
    """So that nobody is done before everybody has been seen."""
    replicas = manager.get_replicas()
    await asyncio.to_thread(lambda: ray.get([replica.server_handle.slow_down.remote(factor) for replica in replicas]))


async def views_of(replicas, running, unmovable):
    """Once so many are under way; a request is placed before it is counted as one that cannot move."""
    async with asyncio.timeout(60):
        while True:
            seen = await asyncio.to_thread(replicas.views)
            if (sum(view.running for view in seen), sum(view.unmovable for view in seen)) == (running, unmovable):
                return seen


def test_requests_that_cannot_move_are_counted_where_they_run(manager, spans):
    replicas = replicas_of(manager)

    async def both():
        await slow_down(manager, 50)
        stuck = asyncio.create_task(generate(client_of(manager), 4, **STUCK))
        alone = await views_of(replicas, 4, 4)
        free = asyncio.create_task(generate(client_of(manager), 2, seed=None, stop=[]))
        together = await views_of(replicas, 6, 4)
        await slow_down(manager, 1)
        await asyncio.gather(stuck, free)
        return alone, together

    alone, together = asyncio.run(both())
    assert [view.unmovable for view in alone] == [view.running for view in alone]
    assert [view.unmovable for view in together] == [view.unmovable for view in alone]
    assert [view.unmovable for view in replicas.views()] == [0, 0, 0]
    named = [span.args["unmovable"] for span in spans() if "unmovable" in span.args]
    assert named == ["seed, stop"] * 4


def test_what_a_connector_is_told_keeps_no_request_from_moving(manager):
    vllm = {"engine_kwargs": {"vllm": {"kv_transfer_config": {"kv_role": "kv_both"}}}}
    fuse = {"disabled_plugins": [], "interstage": {"kv_transfer_params": {"tag": "{weights}"}}}
    config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": vllm}, "fuse": fuse})
    addresses = {address: rank for rank, address in enumerate(manager.get_addresses())}
    client = FuseLLMServerClient(config, manager.global_load_balancer, replicas=addresses)
    replicas, seen = replicas_of(manager), []

    async def of_a_prompt():
        prompts._group.set(PromptGroup("a", "run step 1"))
        await slow_down(manager, 50)
        moving = asyncio.create_task(generate(client, 3))
        await views_of(replicas, 3, 0)
        # One that cannot move is counted only after it was placed.
        await asyncio.sleep(0.5)
        seen.extend(await asyncio.to_thread(replicas.views))
        await slow_down(manager, 1)
        return await moving

    assert [output.token_ids for output in asyncio.run(of_a_prompt())] == [unbroken(n) for n in range(3)]
    assert [(view.running, view.unmovable) for view in seen] == [(1, 0)] * 3


def test_a_request_that_cannot_move_and_meets_a_replica_being_freed_starts_again(manager, spans, caplog):
    """As one that arrives between the decision and the abort would."""
    replicas = replicas_of(manager)
    outputs = while_generating(manager, 9, lambda: replicas.free([0, 2], "fuse.elastic.cut_fraction"), **STUCK)
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(9)]
    assert {output.stop_reason for output in outputs} == {"completed"}
    requests = [span.args for span in spans() if span.name == "request"]
    assert sum(args["stop_reason"] == "aborted" and args["response_tokens"] > 0 for args in requests) == 6
    assert not [args for args in requests if "resumed_tokens" in args], "a seed must see the whole response"
    assert {args["response_tokens"] for args in requests if args["stop_reason"] == "completed"} == {60}
    for rank in (0, 2):
        assert f"replica {rank}, freed by fuse.elastic.cut_fraction, has 3 requests that cannot move" in caplog.text
    assert re.search(
        r"request-\d starts again at another replica, without its \d+ tokens so far: replica 0 was freed, "
        r"and seed=7, stop=\['x'\] cannot be applied",
        caplog.text,
    )
    assert [view.unmovable for view in replicas.views()] == [0, 0, 0]


def test_a_request_that_cannot_move_starts_again_when_its_replica_dies(manager):
    replicas = replicas_of(manager)
    server = manager.get_replicas()[1].server_handle
    outputs = while_generating(manager, 6, lambda: ray.get(server.kill_engine.remote()), **STUCK)
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(6)]
    assert [view.unmovable for view in replicas.views()] == [0, 0, 0]


def step_with_a_tail(manager, limit, lengths):
    """One step as the trainer polls it; where the last tenth was moved, the requests that moved, and the room every
    replica had at the end."""
    replicas = Replicas(
        manager, checkpoints_of(manager), Recorder(lambda span: None), 20.0, max_num_seqs=64, sequence_tokens=16 + limit
    )
    client, done, moved = client_of(manager), [], []

    async def sample(number, tokens):
        output = await client.generate(
            f"sample-{number}", prompt_ids=[1, 1000 * number], sampling_params={**SAMPLING, "max_tokens": tokens}
        )
        done.append((2, len(output.token_ids)))

    async def run():
        running = asyncio.gather(*(sample(number, tokens) for number, tokens in enumerate(lengths)))
        while not running.done():
            left = len(lengths) - len(done)
            replicas.expect(left, LengthTotals.of(done))
            views = await asyncio.to_thread(replicas.views)
            view = RolloutView(1, 0.0, len(lengths), len(done), 1, 0, (), (), views)
            if migration := tail_migration(Trigger(len(lengths) // 10), view):
                freed = [seen.rank for seen in views if seen.rank not in migration.survivors]
                moved.append((migration.survivors, sum(seen.running for seen in views if seen.rank in freed)))
                await asyncio.to_thread(replicas.free, freed, migration.cause)
            await asyncio.sleep(0.02)
        await running

    asyncio.run(run())
    assert sorted(tokens for _, tokens in done) == sorted(lengths)
    return moved


@pytest.mark.parametrize("limit", [300, 16384])
def test_the_tail_moves_whatever_the_limit_of_a_response_is(manager, limit):
    """A KV cache that two sequences as long as the limit of 16384 would fill."""
    for replica in manager.get_replicas():
        ray.get(replica.server_handle.reopen.remote(step_seconds=0.004))
        ray.get(replica.server_handle.keep.remote(2 * 16400))
    lengths = [8 + 7 * number % 50 for number in range(54)] + [220 + 13 * number for number in range(6)]
    ((survivors, count),) = step_with_a_tail(manager, limit, lengths)
    assert len(survivors) == 1
    assert count >= 3, "what the two freed replicas ran"


def test_stop_tokens_and_the_budget_hold_across_the_move(manager):
    replicas = replicas_of(manager)
    outputs = while_generating(manager, 3, lambda: replicas.free([0, 1], "a test"), stop_token_ids=[50, 1040])
    assert [len(output.token_ids) for output in outputs] == [50, 40, 60]


def test_without_a_move_the_server_s_answer_is_handed_on_untouched(manager):
    (output,) = asyncio.run(generate(client_of(manager), 1, tokens=4))
    assert output.extra_fields == {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}


def test_a_replica_that_everybody_is_turned_away_from_is_named(manager):
    for replica in manager.get_replicas():
        ray.get(replica.server_handle.abort_all_requests.remote(reject_request=True))
    with pytest.raises(FuseError, match=r"request-0: 4 replicas in a row turned it away, the last one at server-\d"):
        asyncio.run(generate(client_of(manager), 1))


def test_a_freed_replica_is_routed_again_once_it_confirms_its_weights(manager):
    replicas = replicas_of(manager)
    replicas.free([2], "a test")
    server = manager.get_replicas()[2].server_handle
    for held in (0, 6, 8, None):
        ray.get(server.set_global_steps.remote(held))
        with pytest.raises(FuseError, match=rf"replica 2 holds the weights of step {held} after the sync of step 7"):
            replicas.readmit(7)
        assert [view.routed for view in replicas.views()] == [True, True, False]
    ray.get(server.set_global_steps.remote(7))
    replicas.readmit(7)
    assert manager.entries()[-2:] == ["resume server-2", "routed server-2"]
    assert replicas.freed == ()
    outputs = asyncio.run(generate(client_of(manager), 6, tokens=3))
    assert [output.token_ids for output in outputs] == [unbroken(n, 3) for n in range(6)]


def test_readmitting_nobody_asks_nobody(manager):
    replicas_of(manager).readmit(3)
    assert manager.entries() == []


def test_views_count_requests_in_flight(manager):
    replicas = replicas_of(manager)
    seen = []
    while_generating(manager, 6, lambda: seen.extend(replicas.views()))
    assert seen == [ReplicaView(rank, 2, 64, routed=True, capacity=Capacity(64)) for rank in range(3)]


def test_requests_of_a_dead_engine_start_again_elsewhere(manager, spans):
    replicas = replicas_of(manager)
    server = manager.get_replicas()[1].server_handle
    outputs = while_generating(manager, 6, lambda: ray.get(server.kill_engine.remote()))
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(6)]
    assert [output.stop_reason for output in outputs] == ["completed"] * 6
    failed = [span for span in spans() if "EngineDeadError" in span.args.get("error", "")]
    assert {span.track for span in failed} == {"replica 1"}
    assert len(failed) == 2
    assert [view.routed for view in replicas.views()] == [True, False, True]


def test_a_request_whose_server_is_out_of_reach_for_a_while_is_sent_again(manager, monkeypatch, caplog):
    lost = [2]

    class Lossy(FuseLLMServerClient):
        async def _attempt(self, *args: Any) -> Any:
            output = await super()._attempt(*args)
            if lost[0]:
                lost[0] -= 1
                raise ActorUnavailableError("the connection is lost", None)
            return output

    monkeypatch.setattr(rollout_client, "OUT_OF_REACH", 0.1)
    lossy = Lossy(CONFIG, manager.global_load_balancer)
    outputs = asyncio.run(generate(lossy, 4))
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(4)]
    assert [output.stop_reason for output in outputs] == ["completed"] * 4
    assert caplog.text.count("is out of reach") == 2
    assert all(view.routed for view in replicas_of(manager).views())


def test_a_request_that_moved_keeps_its_tokens_when_the_survivor_of_another_dies(manager):
    replicas = replicas_of(manager)
    server = manager.get_replicas()[1].server_handle

    def free_then_kill():
        replicas.free([0], "a test")
        ray.get(server.kill_engine.remote())

    outputs = while_generating(manager, 6, free_then_kill)
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(6)]


def test_with_no_replica_left_requests_fail_instead_of_waiting(manager):
    def kill_all():
        ray.get([replica.server_handle.kill_engine.remote() for replica in manager.get_replicas()])

    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        while_generating(manager, 6, kill_all)


def test_an_error_that_is_no_death_is_the_request_s_own(manager):
    replicas = replicas_of(manager)
    with pytest.raises(TypeError):
        asyncio.run(generate(client_of(manager), 1, stop_token_ids=5))
    assert all(view.routed for view in replicas.views())


def test_a_dead_replica_is_left_out_of_sleep_and_named_before_the_weight_sync(manager, caplog):
    replicas = replicas_of(manager)
    replicas.require_alive()
    server = manager.get_replicas()[1].server_handle
    while_generating(manager, 6, lambda: ray.get(server.kill_engine.remote()))
    for _ in range(2):
        replicas.views()
    assert caplog.text.count("replica 1 is dead") == 1 + 2, "once by the driver, once by each of its two requests"
    replicas._checkpoints.sleep_replicas()
    asleep = sorted(entry for entry in manager.entries() if entry.startswith("sleep"))
    assert asleep == ["sleep server-0", "sleep server-2"]
    with pytest.raises(FuseError, match=r"dead: replica 1\. The step is trained"):
        replicas.require_alive()


@pytest.mark.parametrize(
    ("fault", "seconds", "why"),
    [
        (["exit"], 120.0, ": ActorDiedError"),
        (["hang", "kill_engine"], 120.0, ": it is dead"),
        (["hang"], 1.0, r" in 1 s \(fuse.replica_timeout\)"),
    ],
)
def test_a_replica_that_does_not_go_to_sleep_is_ended_and_the_others_do(fresh, caplog, fault, seconds, why):
    """Its server is gone; or its engine is, and the server waits for it without a time limit; or nobody knows why."""
    replicas = replicas_of(fresh, timeout=seconds)
    server = fresh.get_replicas()[1].server_handle
    ray.wait([getattr(server, action).remote() for action in fault], num_returns=len(fault))
    with replicas.sleeping():
        replicas._checkpoints.sleep_replicas()
    assert re.search(f"replica 1 did not go to sleep{why}", caplog.text)
    assert "sleep server-0" in fresh.entries()
    assert [view.routed for view in replicas.views()] == [True, False]
    with pytest.raises(FuseError, match=r"dead: replica 1\. The step is trained"):
        replicas.require_alive()


def test_survivors_are_asked_whether_they_live(manager, caplog):
    replicas = replicas_of(manager)
    assert replicas.all_live([0, 1])
    ray.get(manager.get_replicas()[1].server_handle.kill_engine.remote())
    assert not replicas.all_live([0, 1])
    assert "replica 1 was to take over the requests of others" in caplog.text
    assert [view.routed for view in replicas.views()] == [True, False, True]
    with pytest.raises(FuseError, match=r"dead: replica 1\. The step is trained"):
        replicas.require_alive()


def test_a_replica_that_dies_in_the_weight_sync_is_named(fresh):
    replicas, server = replicas_of(fresh), fresh.get_replicas()[1].server_handle
    with pytest.raises(
        FuseError, match=r"weight sync to the rollout replicas failed: ActorDiedError.*silent: replica 1 server \(dead"
    ):
        replicas.sync(lambda: ray.get(server.exit.remote()), 60.0)


def test_suspects_of_a_stalled_rollout_are_the_busy_and_the_dead(manager):
    replicas = replicas_of(manager)
    found = []
    while_generating(manager, 2, lambda: found.extend(replicas.suspects()))
    assert len(found) == 2
    assert all("(1 requests in flight)" in name for name in found)


@pytest.fixture
def fresh(collector):
    """Replicas of a test that ends one for good."""
    manager = CountingManager(2)
    manager.reset()
    return manager


async def watching(replicas, done, seconds=10.0):
    """Look at the replicas as the trainer does, until `done`."""
    for _ in range(int(seconds / 0.05)):
        await asyncio.to_thread(replicas.watched)
        if done():
            return
        await asyncio.sleep(0.05)


def test_a_replica_that_stands_still_is_ended_and_its_requests_start_again(fresh, caplog):
    replicas = replicas_of(fresh, timeout=1.5)

    async def run():
        running = asyncio.create_task(generate(client_of(fresh), 6, tokens=30))
        await asyncio.sleep(0.1)
        await fresh.get_replicas()[1].server_handle.pause_at.remote()
        await watching(replicas, running.done)
        return await running

    outputs = asyncio.run(run())
    assert [output.token_ids for output in outputs] == [unbroken(n, 30) for n in range(6)]
    assert (
        "replica 1 has 3 requests, but has generated nothing for 1.5 s (fuse.replica_timeout); it is ended"
        in caplog.text
    )
    assert [view.routed for view in replicas.views()] == [True, False]
    with pytest.raises(FuseError, match=r"dead: replica 1\. The step is trained"):
        replicas.require_alive()


@pytest.mark.parametrize(("dead", "why"), [(False, r" in 1 s \(fuse.replica_timeout\)"), (True, ": it is dead")])
def test_a_replica_that_cannot_be_freed_is_ended_and_its_requests_start_again(fresh, caplog, dead, why):
    replicas = replicas_of(fresh, timeout=120.0 if dead else 1.0)
    server = fresh.get_replicas()[1].server_handle

    def free():
        ray.get(server.hang.remote())
        if dead:
            ray.get(server.kill_engine.remote())
        replicas.free([1], "a test")

    outputs = while_generating(fresh, 6, free, tokens=40)
    assert [output.token_ids for output in outputs] == [unbroken(n, 40) for n in range(6)]
    assert re.search(f"replica 1 did not stop generating{why}; it is ended", caplog.text)
    assert replicas.freed == ()
    with pytest.raises(FuseError, match=r"dead: replica 1\. The step is trained"):
        replicas.require_alive()


def test_a_replica_that_is_only_slow_is_left_alone(manager):
    replicas = replicas_of(manager, timeout=1.5)

    async def run():
        running = asyncio.create_task(generate(client_of(manager), 3, tokens=6))
        await manager.get_replicas()[2].server_handle.slow_down.remote(60.0)
        await watching(replicas, running.done)
        return await running

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 6) for n in range(3)]
    assert all(view.routed for view in replicas.views())


def test_a_replica_with_more_requests_than_it_can_be_asked_beside_is_left_alone(collector):
    """verl's servers run 1000 calls at once, or as many as the engine's sequences: a question waits behind
    those that are too many."""
    crowded = CountingManager(1, step_seconds=0.1, max_concurrency=4)
    crowded.reset()
    replicas = replicas_of(crowded, timeout=1.0)

    async def run():
        running = asyncio.create_task(generate(client_of(crowded), 12, tokens=20))
        await watching(replicas, running.done)
        return await running

    outputs = asyncio.run(run())
    assert [output.token_ids for output in outputs] == [unbroken(n, 20) for n in range(12)]
    assert all(view.routed for view in replicas.views())


async def leak(manager, rank, count):
    """Let the load balancer count requests that nobody sends, as it does where a process dies with them."""
    balancer, address = manager.global_load_balancer, manager.get_addresses()[rank]
    acquired = [await balancer.acquire_server.remote(f"lost-{n}") for n in range(3 * count)]
    for server, _ in acquired:
        if server != address:
            await balancer.release_server.remote(server)


def test_a_count_of_requests_that_nobody_has_ends_no_replica_and_gives_way_to_the_server_s_word(manager):
    replicas = replicas_of(manager, timeout=1.5)
    counts = []

    async def run():
        await leak(manager, 0, 2)
        await leak(manager, 1, 3)
        running = asyncio.create_task(generate(client_of(manager), 4, tokens=10))
        # Nobody has a request for most of this time.
        await watching(replicas, lambda: counts.append([view.running for view in replicas.views()]), 5.0)
        return await running

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 10) for n in range(4)]
    assert counts[0][1] >= 3, "the load balancer's word, until the server has been asked"
    assert counts[-1] == [0, 0, 0]
    assert all(view.routed for view in replicas.views())
    suspects = [name for name in replicas.suspects() if name.startswith("replica 0")]
    assert suspects == []


def test_a_server_that_does_not_answer_is_ended_whatever_is_counted(fresh, caplog, monkeypatch):
    monkeypatch.setattr("verl_fuse.host.upstream.vllm.ENDING", 1.0)
    replicas = replicas_of(fresh, timeout=1.5)

    async def run():
        running = asyncio.create_task(generate(client_of(fresh), 4, tokens=200))
        await asyncio.sleep(0.3)
        fresh.get_replicas()[1].server_handle.block.remote(30.0)
        await watching(replicas, running.done, 20.0)
        return await running

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 200) for n in range(4)]
    assert "replica 1 has 2 requests, but has generated nothing for 1.5 s" in caplog.text


@pytest.mark.parametrize("stuck", [{}, STUCK])
def test_a_request_given_up_before_it_has_a_server_is_not_counted_for_ever(manager, stuck):
    replicas, client = replicas_of(manager), client_of(manager)
    balancer = manager.global_load_balancer

    async def run():
        await generate(client, 1, tokens=1)
        occupied = balancer.__ray_call__.remote(hold_up)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(client, 5, tokens=5, **stuck), 0.1)
        given_up = asyncio.create_task(generate(client, 1, tokens=5, **stuck))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        await occupied
        await views_of(replicas, 0, 0)
        # Those that are not given up are as always.
        return await generate(client, 3, tokens=5, **stuck)

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 5) for n in range(3)]


def hold_up(_balancer):
    """Runs in the load balancer: requests for a server wait meanwhile."""
    time.sleep(1.0)


def test_requests_that_agents_gave_up_keep_a_server_from_answering_and_it_is_left_alone(collector):
    """The server goes on with them, and a question waits behind them."""
    crowded = CountingManager(1, step_seconds=0.1, max_concurrency=4)
    crowded.reset()
    replicas = replicas_of(crowded, timeout=1.0)

    async def run():
        client = client_of(crowded)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(client, 9, tokens=20), 0.5)
        running = asyncio.create_task(generate(client, 2, tokens=5))
        await watching(replicas, running.done)
        return await running

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 5) for n in range(2)]
    assert all(view.routed for view in replicas.views())


def test_an_engine_that_cannot_say_what_it_holds_is_left_alone(manager):
    replicas = replicas_of(manager, timeout=1.0)
    ray.get([replica.server_handle.__ray_call__.remote(forget_tokens) for replica in manager.get_replicas()])

    async def run():
        running = asyncio.create_task(generate(client_of(manager), 3, tokens=4))
        await slow_down(manager, 60)
        await watching(replicas, running.done)
        return await running

    assert [output.token_ids for output in asyncio.run(run())] == [unbroken(n, 4) for n in range(3)]
    ray.get([replica.server_handle.__ray_call__.remote(remember_tokens) for replica in manager.get_replicas()])


def forget_tokens(server):
    server.engine.output_processor.request_states = {"a": None}.values()


def remember_tokens(server):
    server.engine.output_processor.request_states = server._running


def test_a_collector_that_dies_costs_its_counts_and_no_replica(manager, collector):
    replicas, client = replicas_of(manager), client_of(manager)
    assert asyncio.run(generate(client, 1, tokens=1, **STUCK))
    ray.kill(collector, no_restart=False)
    assert [output.token_ids for output in asyncio.run(generate(client, 3, **STUCK))] == [unbroken(n) for n in range(3)]
    assert [(view.routed, view.unmovable) for view in replicas.views()] == [(True, 0)] * 3


def test_time_in_which_nobody_looked_is_not_time_without_a_token(manager):
    """The thread that looks may be held up by another replica, or by a whole step."""
    replicas = replicas_of(manager, timeout=1.5)

    async def run():
        running = asyncio.create_task(generate(client_of(manager), 6, tokens=1200))
        await watching(replicas, running.done, seconds=0.5)
        await asyncio.sleep(3)
        assert not running.done()
        await watching(replicas, running.done)
        return await running

    assert len(asyncio.run(run())) == 6
    assert all(view.routed for view in replicas.views())


def test_a_replica_that_answers_garbage_counts_as_dead(fresh, caplog):
    replicas, server = replicas_of(fresh), fresh.get_replicas()[1].server_handle
    ray.get(server.answer_garbage.remote())
    outputs = asyncio.run(generate(client_of(fresh), 6, tokens=5))
    assert [output.token_ids for output in outputs] == [unbroken(n, 5) for n in range(6)]
    assert "replica 1 answers garbage: a log-prob of nan" in caplog.text
    assert not is_dead(server, 10.0)
    assert [(view.routed, view.running) for view in replicas.views()] == [(True, 0), (False, 0)]
    assert is_dead(server, 10.0), "it would keep its memory"
    with pytest.raises(FuseError, match=r"dead: replica 1\."):
        replicas.require_alive()


def test_an_answer_that_all_replicas_give_alike_is_handed_on(manager, caplog):
    """Weights or a prompt whose log-probs are no numbers are no replica's fault; verl trains on."""
    replicas = replicas_of(manager)
    for replica in manager.get_replicas():
        ray.get(replica.server_handle.answer_garbage.remote())
    outputs = asyncio.run(generate(client_of(manager), 6, tokens=5))
    assert [output.token_ids for output in outputs] == [unbroken(n, 5) for n in range(6)]
    assert "replica 2: a log-prob of nan" in caplog.text
    assert "so the answer is handed on as verl does" in caplog.text
    assert [(view.routed, view.running) for view in replicas.views()] == [(True, 0)] * 3
    replicas.require_alive()


def test_a_server_that_a_router_rests_is_not_dead(manager, collector, caplog):
    # It forgets the servers of the same addresses that died in other tests.
    ray.kill(collector, no_restart=False)
    replicas = replicas_of(manager)
    ray.get(manager.global_load_balancer.remove_servers.remote(manager.get_addresses()))
    assert [view.routed for view in replicas.views()] == [False] * 3
    replicas.require_one(6)
    replicas.require_alive()
    assert "dead" not in caplog.text
    ray.get(manager.get_replicas()[1].server_handle.kill_engine.remote())
    replicas.views()
    assert caplog.text.count("replica 1 is dead") == 1, "a look finds a death that no client met"


def test_a_replica_whose_server_is_gone_is_named_and_its_requests_start_again(manager, caplog):
    replicas = replicas_of(manager)
    server = manager.get_replicas()[0].server_handle
    outputs = while_generating(manager, 6, lambda: server.exit.remote())
    assert [output.token_ids for output in outputs] == [unbroken(n) for n in range(6)]
    with pytest.raises(FuseError, match=r"(?s)dead: replica 0 \(dead: .*\)\. The step is trained"):
        replicas.require_alive()
    assert [view.routed for view in replicas.views()] == [False, True, True]
    replicas.free([0], "a test")
    assert "replica 0 did not stop generating: ActorDiedError" in caplog.text
