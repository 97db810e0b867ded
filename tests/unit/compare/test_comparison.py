"""The compared values of two runs, and how often the comparison is right."""

import numpy as np
import pytest
from made_runs import made

from verl_fuse.compare.comparison import compare
from verl_fuse.compare.run import RunMetrics
from verl_fuse.compare.verdict import verdict
from verl_fuse.errors import FuseError

SEEDS = 100


def test_a_planted_difference_of_a_fifth_is_found_and_its_interval_holds_it():
    found = [compare(made(seed), made(seed, fused=True, seconds=4.0)) for seed in range(SEEDS)]
    assert np.mean([one.ratio.holds(0.8) for one in found]) >= 0.92
    assert np.mean([one.ratio.high is not None and one.ratio.high < 1 for one in found]) == 1.0
    assert np.mean([one.ratio.value for one in found]) == pytest.approx(0.8, abs=0.01)


def test_of_two_equal_runs_is_said_that_nothing_differs():
    found = [compare(made(seed), made(seed, fused=True)) for seed in range(SEEDS)]
    assert np.mean([one.ratio.holds(1.0) for one in found]) >= 0.92
    # Step time and rewards are each told apart by chance once in twenty pairs.
    assert np.mean([verdict(one).startswith("nothing differs beyond noise") for one in found]) >= 0.86


@pytest.mark.parametrize(("base", "fused"), [(30, 8), (8, 30)])
def test_runs_of_different_lengths_are_compared_in_the_steps_that_both_have(base: int, fused: int):
    found = [compare(made(seed, steps=base), made(seed, fused=True, steps=fused, seconds=4.0)) for seed in range(SEEDS)]
    assert found[0].steps == tuple(range(2, 9))
    # Steps grow by 15 % in 30 steps: a comparison of all steps with all would be off by 5 %.
    assert np.mean([one.ratio.value for one in found]) == pytest.approx(0.8, abs=0.012)
    assert np.mean([one.ratio.holds(0.8) for one in found]) >= 0.92


def test_a_run_compared_with_itself_shows_no_difference_anywhere():
    run = made(3, fused=True)
    found = compare(run, run)
    assert (found.ratio.value, found.ratio.low, found.ratio.high) == (1.0, 1.0, 1.0)
    assert {part.difference.value for part in (*found.stages, found.whole, *found.curves)} == {0.0}


def test_the_first_steps_of_each_run_are_left_out_of_times_and_not_of_rewards():
    resumed = compare(made(1, steps=10), made(1, fused=True, steps=6, first=4))
    assert resumed.steps == (5, 6, 7, 8, 9)
    assert compare(made(1, steps=10), made(1, fused=True), warm_up=3).steps == tuple(range(4, 11))
    (rewards,) = [curve for curve in resumed.curves if curve.name == "reward"]
    assert rewards is not None
    assert (min(rewards.base), min(rewards.fused)) == (1, 4)


def test_stages_add_up_to_the_step_and_validation_is_no_part_of_it():
    data = {
        "timing_s/step": 5.0, "timing_s/gen": 3.0, "timing_s/update_actor": 1.5, "timing_s/testing": 9.0,
        "timing_s/agent_loop/slowest/generate_sequences": 2.0,
    }  # fmt: skip
    run = RunMetrics.of("run", [(1, data), (2, data)])
    found = compare(run, run)
    assert [(stage.name, stage.base) for stage in found.stages] == [("gen", 3.0), ("update_actor", 1.5), ("other", 0.5)]
    assert found.whole.base == sum(stage.base for stage in found.stages)


def test_an_update_with_its_own_values_is_the_critics_update():
    own = {"timing_s/values": 2.0, "timing_s/update_critic": 0.25, "fuse/update_own_values": 0.5}
    passed = {"timing_s/values": 1.0, "timing_s/update_critic": 2.0, "fuse/update_own_values": 0.0}
    base, fused = (
        RunMetrics.of(name, [(step, {"timing_s/step": 5.0, **timed}) for step in range(1, 5)])
        for name, timed in (("base", passed), ("fused", own))
    )
    stages = {stage.name: (stage.base, stage.fused) for stage in compare(base, fused).stages}
    assert stages == {"values": (1.0, 0.0), "update_critic": (2.0, 2.25), "other": (2.0, 2.75)}


def test_a_stage_that_one_run_lacks_took_it_no_time():
    base = RunMetrics.of("base", [(step, {"timing_s/step": 5.0, "timing_s/ref": 1.0}) for step in (1, 2, 3)])
    fused = RunMetrics.of("fused", [(step, {"timing_s/step": 4.0}) for step in (1, 2, 3)])
    stages = {stage.name: (stage.base, stage.fused) for stage in compare(base, fused).stages}
    assert stages == {"ref": (1.0, 0.0), "other": (4.0, 4.0)}


def test_what_was_trained_on_is_counted():
    found = compare(made(1, steps=5), made(1, fused=True, steps=7))
    assert (found.base.tokens, found.fused.tokens) == (5000, 7000)
    assert (found.base.samples, found.fused.samples) == (None, 7 * 64)
    assert (found.base.fallbacks, found.fused.fallbacks) == (None, 0)
    asked = RunMetrics.of("asked", made(1, steps=5).steps.items(), samples_per_step=32)
    assert asked.samples() == 160


def test_a_number_that_is_not_finite_counts_as_not_logged():
    run = RunMetrics.of(
        "run", [(1, {"timing_s/step": float("nan")}), (2, {"timing_s/step": 2.0, "critic/score/mean": float("inf")})]
    )
    assert run.timed == [2]
    assert run.metric("critic/score/mean") == {}


@pytest.mark.parametrize("value", [1e101, -1e300, 1.7e308])
def test_a_number_too_large_to_calculate_with_counts_as_not_logged(value: float):
    run = RunMetrics.of(
        "run", [(step, {"timing_s/step": 5.0, "critic/score/mean": value * step / 4}) for step in (1, 2, 3, 4)]
    )
    assert verdict(compare(run, run)).endswith("no rewards to compare")


def test_a_step_that_was_written_twice_counts_as_written_last():
    assert RunMetrics.of("run", [(1, {"timing_s/step": 9.0}), (1, {"timing_s/step": 2.0})]).seconds(1) == 2.0


def test_a_validation_written_after_its_step_does_not_hide_the_step():
    run = RunMetrics.of("run", [(1, {"timing_s/step": 9.0}), (1, {"val-core/euclid/acc/mean@1": 0.5})])
    assert run.seconds(1) == 9.0
    assert run.metric("val-core/euclid/acc/mean@1") == {1: 0.5}


@pytest.mark.parametrize(
    ("base", "fused", "message"),
    [
        (
            made(1, "base", steps=1),
            made(1),
            r"^base: steps with a time \(timing_s/step\): 1; needs more than the 1 that --warm-up leaves out$",
        ),
        (made(1), RunMetrics.of("empty", []), r"^empty: steps with a time \(timing_s/step\): 0;"),
        (
            made(1, "base", steps=5),
            made(1, "late", first=9, steps=4),
            r"^base has the steps 2 to 5 and late 10 to 12 \(after warm-up\): needs steps of the same number",
        ),
    ],
)
def test_runs_without_a_step_in_common_are_refused(base: RunMetrics, fused: RunMetrics, message: str):
    with pytest.raises(FuseError, match=message):
        compare(base, fused)
