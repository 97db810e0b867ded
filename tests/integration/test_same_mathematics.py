"""Given the same rollouts, stock verl and verl-fuse compute the same numbers: observing is bitwise equal,
streaming equal to rounding.

The rollouts are those of the planned run (conftest.py), replayed by verl's own `skip.rollout_tq`. Streaming splits
batches differently, so padding inside micro-batches, and with it the order of float32 sums, differs; nothing else may.
After the steps that are compared, faults are planted in the streaming run.
"""

import json
import os
import re
from pathlib import Path

import pytest
from verl_runs import RECORDED, RECORDING, Finished, run

from ci.upstream.ab.arms import STREAMING
from ci.upstream.ab.compare import Finding, Tolerance, quantity_difference, step_findings
from ci.upstream.ab.record import Step, quantities
from verl_fuse.spec.timeline import Timeline

pytest.importorskip("torch")
pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

COMPARED = 2
# One of the two devices.
PLACED = "fuse.placement.critic={first:1,devices:1}"
WRONG_ROW, DROPPED = COMPARED + 1, COMPARED + 2
# A run that changes hands at each checkpoint: VERL_FUSE of its environment and the preset, by its steps.
HANDS = {1: ("on", "fast"), 2: ("off", "fast"), 3: ("on", "safe")}
LONG = pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes five minutes: VERL_FUSE_LONG=1")


def replay(
    home: Path, forks: dict[str, str], name: str, *extra: str, steps: int, baseline: bool = False, faults: str = ""
) -> Finished:
    done = run(
        home,
        "ppo-cpu",
        *RECORDED,
        f"skip.rollout_tq.dump_dir={home}/rollouts",
        f"trainer.total_training_steps={steps}",
        *extra,
        name=name,
        # verl files recorded rollouts by experiment name: one name for all runs, a directory for each.
        experiment=RECORDING,
        baseline=baseline,
        record=home / f"{name}.numbers",
        faults=faults,
        forks=forks,
    )
    assert (done.code != 0) == (f":{steps}" in faults), done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def stock(verl_home, planned, forks) -> Finished:
    return replay(verl_home, forks, "stock", f"trainer.save_freq={WRONG_ROW}", steps=WRONG_ROW, baseline=True)


@pytest.fixture(scope="module")
def observed(verl_home, planned, forks) -> Finished:
    return replay(verl_home, forks, "observed", steps=COMPARED)


@pytest.fixture(scope="module")
def streamed(verl_home, planned, forks) -> Finished:
    faults = f"wrong_row:{WRONG_ROW} drop_micro_group:{DROPPED}"
    return replay(verl_home, forks, "streamed", "fuse.interstage.enabled=true", steps=DROPPED, faults=faults)


@pytest.fixture(scope="module")
def handed_on(verl_home, planned, forks) -> dict[int, Finished]:
    """One run by its steps, each trained by a start of its own from the checkpoint of the last."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for step, (switch, preset) in HANDS.items():
            patch.setenv("VERL_FUSE", switch)
            going_on = (f"fuse.preset={preset}", "trainer.save_freq=1", "trainer.resume_mode=auto")
            # The server of forks has imported verl's trainers, and with them the switch, long before.
            started = forks if switch == "on" else {}
            found[step] = replay(verl_home, started, "handed_on", *going_on, steps=step)
            # Workers count their updates from the start of their process.
            for file in numbers(found[step]).glob("*_1_rank*.pt"):
                file.rename(file.with_name(file.name.replace("_1_", f"_{step}_of_{len(HANDS)}_")))
    for file in numbers(found[1]).glob(f"*_of_{len(HANDS)}_*"):
        file.rename(file.with_name(file.name.replace(f"_of_{len(HANDS)}_", "_")))
    return found


@pytest.fixture(scope="module")
def placed(verl_home, planned, forks) -> Finished:
    return replay(verl_home, forks, "placed", PLACED, steps=COMPARED)


@pytest.fixture(scope="module")
def deferred(verl_home, planned, forks) -> Finished:
    return replay(verl_home, forks, "deferred", PLACED, "fuse.placement.defer=true", steps=COMPARED)


def numbers(finished: Finished) -> Path:
    return finished.folder.with_name(f"{finished.folder.name}.numbers")


def step_of(finished: Finished, number: int) -> Step:
    return Step(True, None, finished.metrics[number], quantities(numbers(finished), number))


def parameters(step: Step) -> dict:
    return {name: found for name, found in step.numbers.items() if name.endswith(" parameters")}


def timeline(finished: Finished, step: int) -> Timeline:
    return Timeline.from_json((finished.folder / f"timeline/step_{step:06d}.json").read_text())


def faults(stock: Finished, other: Finished, number: int, tolerance: Tolerance | None) -> list[Finding]:
    found = step_findings(number, step_of(stock, number), step_of(other, number), tolerance)
    return [finding for finding in found if not finding.passed]


@pytest.mark.parametrize("number", range(1, COMPARED + 1))
def test_everything_computed_is_compared_and_has_padding(stock, number):
    step = step_of(stock, number)
    assert int(step.numbers["padding"]["rows"].sum()) == 8, "6 prompts x 4 samples, padded to mini-batches of 16"
    for quantity in (
        "responses",
        "rm_scores",
        "response_mask",
        "old_log_probs",
        "ref_log_prob",
        "values",
        "advantages",
    ):
        assert len(step.numbers[quantity]) == 32, quantity
    ranks = {role: {item.split(":")[0] for item in step.numbers[f"{role} parameters"]} for role in ("actor", "critic")}
    assert ranks == {"actor": {"rank0", "rank1"}, "critic": {"rank0", "rank1"}}
    assert len(step.numbers["actor parameters"]) > 20
    assert {"actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"} <= step.metrics.keys()


@pytest.mark.parametrize("number", range(1, COMPARED + 1))
def test_observing_is_bitwise_equal_to_stock(stock, observed, number):
    assert faults(stock, observed, number, None) == []


@pytest.mark.parametrize("number", range(1, COMPARED + 1))
def test_streaming_computes_the_same_numbers(stock, streamed, number):
    assert streamed.metrics[number]["fuse/streamed_samples"] == 16
    assert faults(stock, streamed, number, STREAMING) == []


@LONG
@pytest.mark.parametrize("number", range(1, COMPARED + 1))
def test_a_deferred_update_of_the_critic_is_bitwise_equal_to_the_same_placement_in_turn(placed, deferred, number):
    assert {item.split(":")[0] for item in step_of(placed, number).numbers["critic parameters"]} == {"rank0"}
    assert "fuse/placement_update_seconds" not in placed.metrics[number]
    assert faults(placed, deferred, number, None) == []


@LONG
def test_a_deferred_update_ends_after_its_step_has_gone_on(deferred):
    """The first one is waited for by the second step, the last one by the run's end; both are
    logged under their own steps."""
    waited = [span for span in timeline(deferred, 2).on("step") if span.name == "wait_for_critic"]
    assert [span.args["of_step"] for span in waited] == [1, 2]
    (values,) = [span for span in timeline(deferred, 2).on("lane critic") if span.name == "values"]
    assert waited[0].end <= values.start
    lines = [json.loads(line) for line in (deferred.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "critic/vf_loss" in line["data"]] == [1, 2]
    assert [line["step"] for line in lines if "timing_s/step" in line["data"]] == [1, 2]
    assert deferred.metrics[2]["fuse/placement_update_seconds"] > 0


@LONG
@pytest.mark.parametrize("number", HANDS)
def test_a_checkpoint_of_either_goes_on_under_the_other(stock, handed_on, number):
    """Weights, moments, and the step: each update is that of an uninterrupted run of stock verl."""
    assert sorted(handed_on[number].metrics) == list(HANDS)
    # By parameters: rows that were balanced have changed places.
    ours, theirs = (step_of(finished, number).numbers for finished in (handed_on[number], stock))
    for name in ("actor parameters", "critic parameters"):
        value, where = quantity_difference(theirs[name], ours[name])
        assert value <= STREAMING.later, where
    switch, preset = HANDS[number]
    assert (f"fuse.preset={preset}: fuse.update.balance=true" in handed_on[number].screen) == (switch == "on")
    assert handed_on[number].screen.count("VERL_FUSE=off: verl's own trainer trains") == (switch == "off")


@LONG
def test_the_position_in_the_data_goes_on_too(stock, handed_on):
    import torch

    file = Path(f"global_step_{WRONG_ROW}/data.pt")
    whole, parts = (torch.load(run.folder / file, weights_only=False) for run in (stock, handed_on[WRONG_ROW]))
    assert whole["_num_yielded"] == parts["_num_yielded"] == WRONG_ROW
    first, second = (state["_sampler_iter_state"] for state in (whole, parts))
    assert torch.equal(*(state["sampler_iter_state"].pop("generator") for state in (first, second)))
    assert first == second


def test_steps_of_stock_verl_are_shown_as_well(stock):
    for step in range(1, WRONG_ROW + 1):
        assert stock.screen.count(f"verl-fuse: step {step}/{WRONG_ROW} done in ") == 1, stock.screen
    assert "pid=" not in stock.screen


def test_a_wrong_row_shows_in_the_comparison(stock, streamed):
    (values,) = [finding for finding in faults(stock, streamed, WRONG_ROW, STREAMING) if finding.what == "values"]
    assert values.value > 9 * values.allowed


def test_a_dropped_micro_group_ends_the_run(streamed):
    assert streamed.code != 0
    assert "is missing from at least one of 32 rows" in streamed.output
    # The cause stands on the screen, though all that was printed is in a file.
    assert re.search(
        r"^verl-fuse: verl ended with exit code 1: .*FuseError: .* is missing from", streamed.screen, re.MULTILINE
    )
    trained = {int(file.name.split("_")[1]) for file in numbers(streamed).glob("actor_*")}
    assert trained == {1, 2, WRONG_ROW}, "nothing was trained on the incomplete batch"
