"""Standalone replicas come and go on a real Ray: placement groups, verl's worker group and load balancer,
over an engine that counts."""

import asyncio
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import Span

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytest.importorskip("verl")
SUPPORT = Path(__file__).parent / "support"
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SUPPORT))
    from counting_engine import CountingManager
    from counting_standalone import CountingStandalone
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from verl.checkpoint_engine.base import CheckpointEngineManager

    from verl_fuse.host.record.spans import Recorder, start_collector
    from verl_fuse.host.rollout.client import FuseLLMServerClient
    from verl_fuse.host.rollout.replicas import Replicas
    from verl_fuse.host.weights.shard import Shard
    from verl_fuse_elastic.standalone.pool import StandalonePool
    from verl_fuse_elastic.standalone.weights import load

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

DEVICES = 2
ROLLOUT = {
    "prompt_length": 16,
    "response_length": 100,
    "name": "vllm",
    "checkpoint_engine": {"backend": "naive", "custom_backend_module": None},
}
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}})
WEIGHTS = {"embed": [1.0, 2.0], "head": [3.0]}


@pytest.fixture(scope="module")
def manager():
    ray.init(
        num_cpus=16,
        num_gpus=DEVICES,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={
            "env_vars": {"VERL_PLATFORM": "cpu", "PYTHONPATH": ":".join([str(SUPPORT), *filter(None, sys.path)])}
        },
    )
    collector = start_collector()
    yield CountingManager(1)
    del collector
    ray.shutdown()


class Run:
    """A pool beside one replica that stays, as the trainer drives both."""

    def __init__(self, manager, most=2, timeout=60.0, faults=None, load_timeout=120.0):
        manager.reset()
        checkpoints = CheckpointEngineManager(CONFIG.actor_rollout_ref.rollout.checkpoint_engine, None, [])
        self.spans: list[Span] = []
        recorder = Recorder(self.spans.append)
        self.manager = manager
        self.replicas = Replicas(manager, checkpoints, recorder, 10.0, max_num_seqs=64, sequence_tokens=116)

        def build(rank):
            return CountingStandalone(rank, manager.journal, (faults or {}).get(rank))

        self.pool = StandalonePool(build, most, self.replicas, recorder, timeout, load_timeout)

    def up(self):
        """Wait until everything that is being created is up, or never will be."""
        deadline = time.monotonic() + 90
        while not all(launch.done for launch in self.pool._launches):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end_step(self, version):
        for replica in self.manager.get_replicas():
            ray.get(replica.server_handle.set_global_steps.remote(version))
        shards = [Shard(name, (0,), torch.tensor(values)) for name, values in WEIGHTS.items()]
        if self.pool.take_in():
            self.pool.load([ray.put([shard]) for shard in shards], version)
        self.replicas.readmit(version)

    @property
    def routed(self):
        return [view.rank for view in self.replicas.views() if view.routed]

    @property
    def client(self):
        return FuseLLMServerClient(
            CONFIG, self.manager.global_load_balancer, replicas={"server-0": 0}, standalone=self.pool.most
        )


@pytest.fixture
def run(manager, request):
    found = Run(manager, **getattr(request, "param", {}))
    yield found
    found.pool.close()
    wait_for(lambda: free_devices() == DEVICES)


def free_devices() -> float:
    return ray.available_resources().get("GPU", 0.0)


def pending_groups() -> int:
    return sum(group["state"] == "PENDING" for group in placement_group_table().values())


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def generate(client, count, tokens=20, then=None):
    params = {"temperature": 1.0, "logprobs": True, "max_tokens": tokens}

    async def requests():
        running = [
            asyncio.create_task(client.generate(f"r{n}", prompt_ids=[1, 1000 * n], sampling_params=dict(params)))
            for n in range(count)
        ]
        await asyncio.sleep(0.1)
        if then is not None:
            await asyncio.to_thread(then)
        return await asyncio.gather(*running)

    return asyncio.run(requests())


def test_replicas_come_generate_under_the_right_weights_and_go(run):
    run.pool.want(2)
    assert run.routed == [0], "nothing waits for them"
    run.up()
    assert free_devices() == 0
    assert run.routed == [0], "not before they have the weights of the step"
    run.end_step(7)
    assert run.routed == [0, 1, 2]
    assert [view.standalone for view in run.replicas.views()] == [False, True, True]
    started = [run.pool._members[rank].replica for rank in (1, 2)]
    assert [ray.get(replica.workers[0].weights.remote()) for replica in started] == [WEIGHTS, WEIGHTS]
    outputs = generate(run.client, 6)
    assert [output.extra_fields["global_steps"] for output in outputs] == [7] * 6
    assert {span.track for span in run.spans if span.name == "start"} == {"replica 1", "replica 2"}
    request = Span("request", "replica standalone-2", "generate", 0.0, 1.0)
    assert run.replicas.named(request).track == "replica 2"

    ray.get(run.manager.journal.clear.remote())
    run.end_step(8)
    assert run.routed == [0, 1, 2]
    entries = run.manager.entries()
    assert entries.index("abort standalone-1 reject") < entries.index("resume standalone-1"), "not while it loads"
    assert {output.extra_fields["global_steps"] for output in generate(run.client, 6)} == {8}

    run.pool.want(1)
    assert run.routed == [0, 1], "the newest goes"
    wait_for(lambda: free_devices() == 1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(started[1].server_handle.set_global_steps.remote(9))
    run.pool.want(2)
    run.up()
    run.end_step(9)
    assert run.routed == [0, 1, 3], "a rank is given once"


def test_a_replica_that_dies_is_lost_and_nothing_else(run, caplog):
    run.pool.want(1)
    run.up()
    run.end_step(1)
    server = run.pool._members[1].replica.server_handle
    outputs = generate(run.client, 4, tokens=60, then=lambda: server.exit.remote())
    assert [len(output.token_ids) for output in outputs] == [60] * 4
    assert run.routed == [0]
    run.replicas.require_alive()
    assert (
        "replica 1 is dead; its requests start again on other replicas, and the run goes on without it" in caplog.text
    )
    run.end_step(2)
    assert run.replicas.lost == ()
    wait_for(lambda: free_devices() == DEVICES)
    run.pool.want(1)
    run.up()
    run.end_step(3)
    assert run.routed == [0, 2]


def test_a_replica_that_does_not_stop_between_two_steps_is_lost(run, caplog):
    run.pool.want(1)
    run.up()
    run.end_step(1)
    server = run.pool._members[1].replica.server_handle
    ray.get(server.hang.remote())
    run.replicas.free([1], "a test")
    # In the middle of a rollout: its requests must not wait for the end of the step.
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(server.__ray_ready__.remote(), timeout=10)
    assert run.replicas.lost == (1,)
    run.end_step(2)
    assert run.routed == [0]
    assert "replica 1 did not stop generating in 10 s (fuse.replica_timeout)" in caplog.text
    wait_for(lambda: free_devices() == DEVICES)


@pytest.mark.parametrize("run", [{"faults": {1: "load"}}], indirect=True)
def test_a_replica_that_cannot_load_is_lost_and_the_others_have_loaded(run, caplog):
    run.pool.want(2)
    run.up()
    run.end_step(5)
    assert run.routed == [0, 2]
    assert "replica 1 did not load its weights: ValueError: unexpected parameter" in caplog.text
    wait_for(lambda: free_devices() == 1)


def test_a_replica_loads_only_what_it_was_offered_before(manager, tmp_path):
    """Calls of an asynchronous actor run in any order."""

    @ray.remote(num_cpus=0)
    def noted(what, seconds, fails):
        time.sleep(seconds)
        if fails:
            raise ValueError("no room")
        with (tmp_path / "calls").open("a") as file:
            file.write(f"{what} ")

    def replica(seconds, fails=False):
        offer = SimpleNamespace(remote=lambda offered, buckets: noted.remote("offered", seconds, fails))
        update = SimpleNamespace(remote=lambda global_steps: noted.remote("loaded", 0.0, False))
        return SimpleNamespace(workers=[SimpleNamespace(__ray_call__=offer, update_weights=update)])

    assert load({1: replica(1.0)}, [], 3, 60.0) == {}
    assert (tmp_path / "calls").read_text().split() == ["offered", "loaded"]
    assert load({1: replica(0.0, fails=True)}, [], 3, 60.0) == {1: "did not load its weights: ValueError: no room"}
    assert load({1: replica(30.0)}, [], 3, 2.0) == {1: "did not load its weights in 2 s (fuse.weight_sync_timeout)"}
    assert (tmp_path / "calls").read_text().split() == ["offered", "loaded"]


@pytest.mark.parametrize("run", [{"faults": {1: "launch"}}], indirect=True)
def test_a_launch_that_fails_leaves_nothing_and_is_tried_again(run, caplog):
    run.pool.want(1)
    run.up()
    wait_for(lambda: free_devices() == DEVICES)
    run.end_step(1)
    assert "replica 1 could not be created: no port left; the run goes on without it" in caplog.text
    assert run.routed == [0]
    run.pool.want(1)
    run.up()
    run.end_step(2)
    assert run.routed == [0, 2]


@pytest.mark.parametrize("run", [{"timeout": 3.0}], indirect=True)
def test_devices_are_asked_for_until_the_deadline_or_until_they_are_not_wanted(run, caplog):
    everything = placement_group([{"GPU": DEVICES}])
    assert everything.wait(20)
    run.pool.want(2)
    wait_for(lambda: pending_groups() == 2)
    run.pool.want(1)
    wait_for(lambda: pending_groups() == 1)
    run.up()
    run.end_step(1)
    assert "replica 1 could not be created: Ray found no room for 1 x {'CPU': 2, 'GPU': 1} within 3 s" in caplog.text
    assert pending_groups() == 0
    remove_placement_group(everything)


def test_only_the_caller_of_a_launch_that_is_done_gets_its_replica(run):
    run.pool.want(1)
    run.up()
    run.pool.want(0)
    wait_for(lambda: free_devices() == DEVICES)
    run.end_step(1)
    assert run.routed == [0]


def test_a_replica_that_stays_is_still_needed(run):
    run.pool.want(1)
    run.up()
    run.end_step(1)
    server = run.manager.get_replicas()[0].server_handle
    ray.get(server.kill_engine.remote())
    with pytest.raises(FuseError, match=r"dead: replica 0"):
        run.replicas.require_alive()
