"""Two real GRPO runs on a cluster of several nodes, which Ray's autoscaler adds. One grows from one vLLM replica to
three and shrinks to one while it trains, as it is told; another Ray job gets the devices it gives back; a node is
removed in the middle of a step. In the other the scaler decides, as lengths drift."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
import drifting_lengths
import replica_phases as phases
from autoscaled_cluster import AutoscaledCluster

from verl_fuse_cpu.environment import environment

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    # 24 steps, ten engines that start: more than the suite's time allows on two cores.
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes ten minutes: VERL_FUSE_LONG=1"),
]

SUPPORT = Path(__file__).parent / "support"
STEPS = len(phases.WANTED)
PROMPTS, PER_PROMPT = 6, 4
SAMPLES = PROMPTS * PER_PROMPT
# Of the run in which lengths drift: samples of a prompt, so many that one replica alone is slower by far.
# Few prompts: what each sample takes beside decoding, on the processes that all replicas share, looks like work that
# another replica would halve.
DRIFTING_STEPS, DRIFTING_PROMPTS, MANY = 14, 2, 32
# Replicas that hold devices while a step generates.
HELD = {1: 1, 2: 1, 3: 1, 4: 1, 5: 3, 6: 1, 7: 1, 8: 1, 9: 2, 10: 1}
# Largest difference in a token's probability between rollout and trainer, both in float32; 2e-5
# is the largest seen here.
ROLLOUT_TOLERANCE = 6e-5
RAY = ("num_cpus", "num_gpus", "object_store_memory")
OF_REPLICAS = ("EngineCore", "vLLMHttpServer", "CheckpointEngineWorker")
OTHER_JOB = """
import json, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)
begun = time.monotonic()

@ray.remote(num_gpus=1, num_cpus=2)
def there():
    return ray.get_runtime_context().get_node_id()

asked = [there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in sys.argv[2:]]
got = ray.get([one.remote() for one in asked], timeout=60)
print(json.dumps({"got": got, "seconds": time.monotonic() - begun}))
"""


@pytest.fixture(scope="module")
def cluster(verl_home, tmp_path_factory):
    """A head node with one virtual device, and up to three more nodes with one each, one of which goes away."""
    folder = tmp_path_factory.mktemp("standalone")
    site = folder / "site"
    metadata = site / "replica_phases-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: replica-phases\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl_fuse]\nreplica_phases = replica_phases\n")
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers inherit the environment of their node.
        for name, value in environment().items():
            patch.setenv(name, value)
        path = [str(site), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("PHASES", str(folder))
        patch.setenv("VERL_FUSE_HOME", str(verl_home))
        patch.setenv("VERL_FILE_LOGGER_PATH", str(verl_home / "standalone" / "metrics.jsonl"))
        for name in ("RAY_TMPDIR", "RAY_FAKE_CLUSTER", "AUTOSCALER_UPDATE_INTERVAL_S"):
            patch.setenv(name, "")
            patch.delenv(name)
        cluster = AutoscaledCluster(devices=1, nodes=3)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def take_part(cluster, found):
    """Cause the events outside of the run, in the order of its steps."""
    phases.told("freed", 900)
    # The autoscaler may have added a node that no replica has used.
    job = [sys.executable, "-c", OTHER_JOB, cluster.address, *given_back(Path(os.environ["PHASES"]))]
    found["other job"] = json.loads(
        subprocess.run(job, capture_output=True, check=True, timeout=120).stdout.splitlines()[-1]
    )
    phases.tell("taken")
    found["stopped"] = phases.told("stopped", 900)
    cluster.remove(found["stopped"]["node"])
    phases.tell("node_gone")


def given_back(folder: Path) -> list[str]:
    """Return the nodes of the replicas that step 6 stops."""
    return sorted({node for _, node in told(folder, phases.FREED)["pids"].values()})


def train(cluster, home: Path, name: str, steps: int, *extra: str) -> Finished:
    """GRPO on the cluster, with up to two standalone replicas beside the one on the training device."""
    done = run(
        home,
        "grpo-cpu",
        *SMALL,
        f"data.train_batch_size={PROMPTS}",
        "trainer.n_gpus_per_node=1",
        f"+ray_kwargs.ray_init.address={cluster.address}",
        *(f"ray_kwargs.ray_init.{key}=null" for key in RAY),
        "fuse.elastic.enabled=true",
        "fuse.elastic.scale=true",
        "fuse.elastic.standalone=2",
        "fuse.elastic.standalone_timeout=240",
        f"trainer.total_training_steps={steps}",
        *extra,
        name=name,
        timeout=900,
    )
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def finished(cluster, verl_home):
    found = {}
    outside = threading.Thread(target=take_part, args=(cluster, found), daemon=True)
    outside.start()
    done = train(cluster, verl_home, "standalone", STEPS, "trainer.total_epochs=1")
    outside.join(10)
    return done, found, Path(os.environ["PHASES"])


def timeline(done, step: int) -> Timeline:
    return Timeline.from_json((done.folder / f"timeline/step_{step:06d}.json").read_text())


def told(cluster_folder: Path, step: int) -> dict:
    return json.loads((cluster_folder / f"step_{step}.json").read_text())


def completed(done, step: int) -> Counter:
    """Requests that each replica finished."""
    return Counter(
        s.track for s in timeline(done, step).spans if s.name == "request" and s.args.get("stop_reason") == "completed"
    )


def test_it_grows_to_three_replicas_and_shrinks_to_one_between_steps_while_it_trains(finished):
    done, _, folder = finished
    there = {step: told(folder, step)["ranks"] for step in range(1, STEPS + 1)}
    assert there == {1: [0], 2: [0], 3: [0], 4: [0], 5: [0, 1, 2], 6: [0, 1, 2], 7: [0], 8: [0], 9: [0, 3], 10: [0]}
    assert {told(folder, step)["most"] for step in there} == {3}
    for step in (1, 2, 3, 4, 6, 7, 8, 10):
        assert completed(done, step) == {"replica 0": SAMPLES}
    # Prompts are shared out by predicted tokens, so each replica has one at least, with all its samples.
    shares = completed(done, 5)
    assert shares.keys() == {"replica 0", "replica 1", "replica 2"}
    assert shares.total() == SAMPLES
    assert {share % PER_PROMPT for share in shares.values()} == {0}
    # Step 3 was trained between the question for more replicas and their arrival.
    created = {span.track: span for span in timeline(done, 4).spans if span.name == "start"}
    assert set(created) == {"replica 1", "replica 2"}
    assert {span.track for span in timeline(done, 8).spans if span.name == "start"} == {"replica 3"}
    began = timeline(done, 3).start
    assert all(span.start - span.args["placement_seconds"] < began for span in created.values())


def test_every_replica_generates_under_the_weights_of_the_step(finished):
    """The account refuses any other version; rollout and trainer agree in every token only if
    the weights are the same."""
    done, _, _ = finished
    assert {metrics["training/rollout_probs_diff_max"] < ROLLOUT_TOLERANCE for metrics in done.metrics.values()} == {
        True
    }
    loaded = {step: {s.track for s in timeline(done, step).spans if s.name == "load_weights"} for step in (4, 5, 6, 8)}
    assert loaded == {4: {"replica 1", "replica 2"}, 5: {"replica 1", "replica 2"}, 6: set(), 8: {"replica 3"}}
    for step in (4, 5, 8):
        spans = {span.name: span for span in timeline(done, step).on("step")}
        assert spans["export_whole"].end <= spans["update_weights"].start, "while the engines on those devices sleep"


def test_another_job_gets_the_devices_that_are_given_back_at_once(finished):
    _, found, folder = finished
    other = found["other job"]
    assert other["got"] == given_back(folder)
    assert len(other["got"]) == 2
    engines = [pid for pid, _ in told(folder, phases.FREED)["pids"].values()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines), "their engines are gone"


def test_a_node_that_goes_away_in_the_middle_of_a_step_costs_no_sample(finished):
    done, found, _ = finished
    lost = found["stopped"]
    assert (lost["rank"], lost["finished"] < SAMPLES) == (3, True)
    failed = [s for s in timeline(done, phases.LOST_IN).spans if s.name == "request" and "error" in s.args]
    assert {span.track for span in failed} == {"replica 3"}
    ended = completed(done, phases.LOST_IN)
    assert ended == {"replica 0": SAMPLES}
    # Ray may say first that the replica is out of reach: each attempt to send a request there again is one more.
    attempts = Counter(span.args["prompt"] for span in failed)
    assert attempts, "it had requests"
    assert min(attempts.values()) >= PER_PROMPT, "whole prompts were its own"
    assert (
        "replica 3 is dead; its requests start again on other replicas, and the run goes on without it" in done.output
    )


def test_every_sample_is_trained_once_and_the_run_ends_well(finished):
    done, _, _ = finished
    assert sorted(done.metrics) == sorted(done.accounts()) == list(range(1, STEPS + 1))
    assert {(a["samples"], a["missing"], a["groups"]) for a in done.accounts().values()} == {(SAMPLES, 0, PROMPTS)}
    assert {metrics["fuse/fallbacks"] for metrics in done.metrics.values()} == {0}


def test_what_they_hold_is_paid_for(finished):
    done, _, _ = finished
    for step, metrics in done.metrics.items():
        spans = timeline(done, step)
        (generation,) = [span for span in spans.on("step") if span.name == "gen"]
        held = metrics["fuse/device_seconds_busy"] + metrics["fuse/device_seconds_idle"]
        assert held == pytest.approx(HELD[step] * generation.seconds)
        starting = sum(span.seconds for span in spans.spans if span.name == "start")
        assert metrics["fuse/device_seconds_starting"] == pytest.approx(starting)


def test_nothing_is_left_of_replicas_that_came_and_went(finished, cluster):
    """One was being created when the run ended."""
    _, _, folder = finished
    assert told(folder, STEPS)["ranks"] == [0]
    deadline = time.monotonic() + 30
    while left := [
        title for title in map(" ".join, cluster.command_lines()) if any(name in title for name in OF_REPLICAS)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.fixture(scope="module")
def drifted(cluster, finished, verl_home):
    """The same two prompts in every step; from the seventh step on one of them is what generation waits for."""
    agents = verl_home / "agents.yaml"
    agents.write_text(drifting_lengths.AGENTS)
    return train(
        cluster,
        verl_home,
        "drifted",
        DRIFTING_STEPS,
        f"data.train_batch_size={DRIFTING_PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={DRIFTING_PROMPTS}",
        f"actor_rollout_ref.rollout.n={MANY}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=drifting",
        f"data.train_max_samples={DRIFTING_PROMPTS}",
        "data.shuffle=false",
        f"trainer.total_epochs={DRIFTING_STEPS}",
        # Two replicas pay where one takes 1.46 times as long, and are left where it takes less than 1.31 times as long.
        "fuse.elastic.cost_weight=0.65",
        "+ray_kwargs.ray_init.runtime_env.env_vars.PHASES_BY=scaler",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={verl_home}/drifted/metrics.jsonl",
    )


def test_the_scaler_creates_replicas_while_they_pay_and_gives_them_back_when_lengths_drift(drifted):
    folder = Path(os.environ["PHASES"])
    ranks = {
        step: json.loads((folder / f"scaled_{step}.json").read_text())["ranks"] for step in range(1, DRIFTING_STEPS + 1)
    }
    counts = {step: len(found) for step, found in ranks.items()}
    print(counts)
    assert {counts[step] for step in range(1, phases.SCALED_BEFORE + 1)} == {1}
    # Two or three pay: that depends on what a decoding step costs on this machine beside what
    # each sequence in it costs.
    assert 1 < counts[phases.SCALED_BEFORE + 1] <= 3
    assert 1 < counts[drifting_lengths.DRIFTED] <= 3
    assert ranks[DRIFTING_STEPS] == [0]
    after = [counts[step] for step in range(drifting_lengths.DRIFTED, DRIFTING_STEPS + 1)]
    assert after == sorted(after, reverse=True)
    for step, generating in ranks.items():
        # In the step that gives some back the question is asked of all there are.
        assert set(completed(drifted, step)) <= {f"replica {rank}" for rank in generating}
        assert drifted.metrics[step]["fuse/elastic_replicas"] == len(completed(drifted, step))


def test_no_sample_is_lost_and_every_length_is_the_one_asked_for(drifted):
    assert sorted(drifted.accounts()) == list(range(1, DRIFTING_STEPS + 1))
    for step, account in drifted.accounts().items():
        assert (account["samples"], account["missing"], account["groups"]) == (
            DRIFTING_PROMPTS * MANY,
            0,
            DRIFTING_PROMPTS,
        )
        asked = [
            drifting_lengths.tokens(step, prompt, sample)
            for prompt in range(DRIFTING_PROMPTS)
            for sample in range(MANY)
        ]
        requests = [s for s in timeline(drifted, step).spans if s.name == "request"]
        assert sorted(int(s.args["response_tokens"]) for s in requests) == sorted(asked)
        assert drifted.metrics[step]["training/rollout_probs_diff_max"] < ROLLOUT_TOLERANCE
        assert drifted.metrics[step]["fuse/fallbacks"] == 0
