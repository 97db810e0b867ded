"""Four steps of PPO on FSDP2 whose critic learns while the next step begins: bitwise those of the same placement in
turn, also where the critic's worker is killed in a deferred update and the run goes on from its checkpoint.

With streamed values a third run differs by what streaming may change, sums over other micro-batches.

Two steps of it are in test_same_mathematics.py. Rollouts are those of the planned run (conftest.py), replayed by
verl's own `skip.rollout_tq`.
"""

import os
from pathlib import Path

import pytest
from verl_runs import RECORDED, RECORDING, Finished, run

from ci.upstream.ab.arms import STREAMING
from ci.upstream.ab.compare import step_findings
from ci.upstream.ab.record import Step, quantities
from verl_fuse.cli.report import read_metrics
from verl_fuse.compare.run import RunMetrics
from verl_fuse.spec.timeline import Timeline

pytest.importorskip("torch")
pytest.importorskip("verl")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not os.environ.get("VERL_FUSE_LONG"), reason="VERL_FUSE_LONG is not set"),
]

FIRST_METRICS = "first.jsonl"
STEPS, SAVED, DIES = 4, 2, 3
PLACED = "fuse.placement.critic={first:1,devices:1}"
DEFERRED = (PLACED, "fuse.placement.defer=true")
STREAMED = (*DEFERRED, "fuse.interstage.enabled=true", "fuse.interstage.micro_group=4")
CHECKPOINTS = (f"trainer.save_freq={SAVED}", "trainer.resume_mode=auto")


def replay(home: Path, forks: dict[str, str], name: str, record: str, *extra: str, dies: int = 0) -> Finished:
    return run(
        home,
        "ppo-cpu",
        *RECORDED,
        f"skip.rollout_tq.dump_dir={home}/rollouts",
        f"trainer.total_training_steps={STEPS}",
        *extra,
        name=name,
        experiment=RECORDING,
        record=home / record,
        recorder="step_recorder,critic_faults",
        variables={"CRITIC_DIES_AT": str(dies), "CRITIC_DIED": str(home / f"{name}.died")},
        forks=forks,
    )


@pytest.fixture(scope="module")
def in_turn(verl_home, planned, forks) -> Finished:
    done = replay(verl_home, forks, "in_turn", "in_turn.numbers", PLACED)
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def killed(verl_home, planned, forks) -> Finished:
    done = replay(verl_home, forks, "deferred_mortal", "deferred_mortal.numbers", *DEFERRED, *CHECKPOINTS, dies=DIES)
    # The same command writes this file anew.
    (done.folder / "metrics.jsonl").rename(done.folder / FIRST_METRICS)
    return done


@pytest.fixture(scope="module")
def resumed(verl_home, killed, forks) -> Finished:
    done = replay(verl_home, forks, "deferred_mortal", "deferred_resumed.numbers", *DEFERRED, *CHECKPOINTS)
    assert done.code == 0, done.output[-4000:]
    # Workers count their updates from the start of their run.
    for file in (verl_home / "deferred_resumed.numbers").glob("*_rank*.pt"):
        role, count, rank = file.stem.split("_")
        file.rename(file.with_name(f"{role}_{int(count) + SAVED}_{rank}.after"))
    for file in (verl_home / "deferred_resumed.numbers").glob("*.after"):
        file.rename(file.with_suffix(".pt"))
    return done


@pytest.fixture(scope="module")
def streamed(verl_home, planned, forks) -> Finished:
    done = replay(verl_home, forks, "deferred_streamed", "deferred_streamed.numbers", *STREAMED)
    assert done.code == 0, done.output[-4000:]
    return done


def step_of(folder: Path, metrics: Path, number: int) -> Step:
    return Step(True, None, RunMetrics.of("", read_metrics(metrics)).steps[number], quantities(folder, number))


def test_a_critic_that_dies_in_a_deferred_update_ends_the_run_by_name(killed):
    assert killed.code != 0
    assert "lane 'critic'" in killed.output
    assert (killed.folder / f"global_step_{SAVED}").exists()
    assert not (killed.folder / f"global_step_{STEPS}").exists()


@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_every_number_is_that_of_the_same_placement_in_turn(verl_home, in_turn, killed, resumed, number):
    first = number <= SAVED
    metrics = killed.folder / (FIRST_METRICS if first else "metrics.jsonl")
    ours = step_of(verl_home / ("deferred_mortal.numbers" if first else "deferred_resumed.numbers"), metrics, number)
    serial = step_of(verl_home / "in_turn.numbers", in_turn.folder / "metrics.jsonl", number)
    assert [finding for finding in step_findings(number, serial, ours, None) if not finding.passed] == []


@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_streamed_values_are_those_of_the_same_placement_in_turn(verl_home, in_turn, streamed, number):
    ours = step_of(verl_home / "deferred_streamed.numbers", streamed.folder / "metrics.jsonl", number)
    serial = step_of(verl_home / "in_turn.numbers", in_turn.folder / "metrics.jsonl", number)
    assert [finding for finding in step_findings(number, serial, ours, STREAMING) if not finding.passed] == []


def test_values_are_streamed_once_the_critic_has_the_last_step_s_weights(streamed):
    """A replayed rollout is complete at the first look, at which later steps' updates still run."""
    for number in range(1, STEPS + 1):
        path = streamed.folder / f"timeline/step_{number:06d}.json"
        on_lane = Timeline.from_json(path.read_text()).on("lane critic")
        groups = [span for span in on_lane if span.name == "values" and "micro_group" in span.args]
        assert groups or number > 1
        updates = [span for span in on_lane if span.name == "update_critic" and span.args.get("of_step") == number - 1]
        assert all(update.end <= group.start for update in updates for group in groups)


def test_a_checkpoint_waited_for_the_critic_of_its_step(killed):
    path = killed.folder / f"timeline/step_{SAVED:06d}.json"
    stages = {(s.name, s.args.get("of_step")): s for s in Timeline.from_json(path.read_text()).on("step")}
    assert stages["wait_for_critic", SAVED].end <= stages["save_checkpoint", None].start
