"""Advised features, and features that are not advised."""

from dataclasses import replace

import pytest

from verl_fuse import plugins
from verl_fuse.advice import Advice, Gain, advice_of_replay, advice_of_rows, advise, chosen_of
from verl_fuse.cli.refused import Refusals
from verl_fuse.feature import SWITCH
from verl_fuse.simulate.compare import Estimate, StrategyResult
from verl_fuse.simulate.recorded import Replay, Saving

FEATURES = plugins.features(plugins.load())
EXCLUDED = Refusals(None).together


def gain(feature: str, share: float, device_share: float = 0.0, sure: bool = True) -> Gain:
    return Gain(feature, 10 * share, share, device_share, sure=sure)


def row(strategy: str, seconds: float, device_hours: float = 1.0, spread: float = 0.001) -> StrategyResult:
    """One strategy of which stock takes 10 s."""

    def around(value: float) -> Estimate:
        return Estimate(value, value - spread, value + spread)

    return StrategyResult(
        strategy, around(seconds), 1.0, 1.0, around(10 / seconds), 0.5, device_hours, around(1.0), around(device_hours),
        (), None,  # type: ignore[arg-type]
    )  # fmt: skip


def never(strategy: str) -> StrategyResult:
    raise AssertionError(f"{strategy} is simulated again")


def advised(gains: list[Gain]) -> Advice:
    chosen = chosen_of(gains, FEATURES, EXCLUDED)
    return advise(gains, chosen, 10.0, "10 s", FEATURES, EXCLUDED, "observe mode is on")


def of(rows: list[StrategyResult], simulate=never) -> Advice:
    return advice_of_rows(rows, FEATURES, EXCLUDED, simulate)[0]


def test_the_gains_that_count_are_advised_the_largest_first():
    advice = advised([gain("pipeline", 0.05), gain("streaming", 0.004), gain("interstage", 0.2)])
    assert advice.features == ("interstage", "pipeline")
    assert advice.overrides == (*FEATURES["interstage"].overrides, *FEATURES["pipeline"].overrides)
    assert advice.sentence == (
        "switch on interstage (2.00 s a step, 20%), pipeline (0.50 s a step, 5%); together 10 s; observe mode is "
        "on; less than 1% is predicted from streaming"
    )


def test_where_nothing_gains_it_says_so():
    advice = advised([gain("interstage", 0.009), gain("scaling", -0.2), gain("pipeline", 0.3, sure=False)])
    assert (advice.features, advice.overrides) == ((), ())
    assert advice.sentence == (
        "switch no feature on: none is predicted to gain 1% of a step; observe mode is on; the gain of pipeline is "
        "within the prediction's error"
    )


def test_of_two_that_exclude_each_other_the_better_one_is_advised():
    both = [gain("streaming", 0.05), gain("interstage", 0.2), gain("scaling", 0.1, 0.5)]
    assert [one.feature for one in chosen_of(both, FEATURES, EXCLUDED)] == ["interstage"]
    assert "streaming and scaling cannot be on together with that" in advised(both).sentence


def test_device_time_given_back_is_a_gain_and_its_price_is_told():
    advice = advised([gain("scaling", -0.03, 0.4)])
    assert advice.sentence == "switch on scaling (40% less device time in all, steps 3% longer); observe mode is on"


def test_strategies_are_compared_with_observe_mode_not_with_stock():
    rows = [
        row("stock", 10.0),
        row("observe", 8.0, 0.8),
        row("interstage", 7.95, 0.795),
        row("scaling", 8.0, 0.4),
        row("all", 4.0, 0.1),
    ]
    advice, together = advice_of_rows(rows, FEATURES, EXCLUDED, never)
    assert (advice.features, together) == (("scaling",), rows[3])
    assert advice.overrides[: len(SWITCH)] == SWITCH
    assert "observe mode alone is 1.25 times as fast as stock [1.25, 1.25]" in advice.sentence
    seconds = {"interstage": 7.0, "observe": 8.0}
    without = of([rows[0], row("interstage", 7.0)], lambda strategy: row(strategy, seconds[strategy]))
    assert "interstage (1.00 s a step, 12%)" in without.sentence, "observe mode has no row of its own"
    advice, together = advice_of_rows(rows[:3], FEATURES, EXCLUDED, never)
    assert (advice.features, together) == ((), rows[1])


def test_a_streamed_update_gains_what_it_adds_to_the_pass_that_is_left_out():
    rows = [row("stock", 10.0), row("observe", 10.0), row("old_log_prob", 9.0), row("stream", 8.5)]
    advice = of(rows, lambda strategy: {"old_log_prob+stream": row(strategy, 8.5)}[strategy])
    assert advice.features == ("old_log_prob", "stream")
    assert "old_log_prob (1.00 s a step, 10%), stream (0.50 s a step, 5%)" in advice.sentence
    assert advice.overrides.count("fuse.update.skip_old_log_prob=true") == 1
    assert of([*rows[:3], row("stream", 9.0)]).features == ("old_log_prob",)


def test_a_gain_within_its_interval_is_not_advised():
    rows = [row("stock", 10.0), row("observe", 8.0, spread=0.2), row("interstage", 7.8, spread=0.2)]
    assert of(rows).features == ()


def test_what_is_advised_is_simulated_together_and_what_gains_nothing_then_is_left_out():
    rows = [row("stock", 10.0), row("observe", 10.0), row("zero_gradient", 6.0), row("old_log_prob", 7.0)]
    rows.append(row("share_prompts", 8.0))
    simulated = {
        "zero_gradient+old_log_prob+share_prompts": 4.95,
        "zero_gradient+old_log_prob": 5.0,
        "zero_gradient+share_prompts": 5.3,
        "old_log_prob+share_prompts": 6.5,
    }
    asked = []

    def simulate(strategy: str) -> StrategyResult:
        asked.append(strategy)
        return row(strategy, simulated[strategy])

    advice, together = advice_of_rows(rows, FEATURES, EXCLUDED, simulate)
    # 0.05 s of 10 s are less than one per cent.
    assert advice.features == ("zero_gradient", "old_log_prob")
    assert advice.overrides[-1] == "fuse.update.metrics=computed"
    assert (together.strategy, together.seconds.mean, advice.saved) == ("zero_gradient+old_log_prob", 5.0, 5.0)
    assert len(asked) == len(set(asked)), "nothing is simulated twice"
    assert advice.sentence == (
        "switch on zero_gradient (4.00 s a step, 40%), old_log_prob (3.00 s a step, 30%); together 5.00 s a step, "
        "2.00 times as fast as stock [2.00, 2.00]; observe mode alone is 1.00 times as fast as stock [1.00, 1.00]; "
        "share_prompts would gain less than 1% beside that"
    )
    simulated["zero_gradient+old_log_prob+share_prompts"] = 4.85
    assert of(rows, simulate).features == ("zero_gradient", "old_log_prob", "share_prompts")


def test_of_two_that_save_the_same_the_larger_one_is_advised():
    rows = [row("stock", 10.0), row("observe", 10.0), row("interstage", 8.0), row("old_log_prob", 8.5)]
    advice, together = advice_of_rows(rows, FEATURES, EXCLUDED, lambda strategy: row(strategy, 8.0))
    assert (advice.features, together) == (("interstage",), rows[2])
    assert "old_log_prob would gain less than 1% beside that" in advice.sentence


def test_device_time_that_is_given_back_is_a_gain_in_a_set():
    rows = [row("stock", 10.0), row("observe", 10.0), row("old_log_prob", 8.0), row("scaling", 10.2, 0.5)]
    both = row("old_log_prob+scaling", 8.2, 0.5)
    assert of(rows, lambda strategy: both).features == ("old_log_prob", "scaling")


def replayed(savings: dict[str, Saving], beside: dict[str, dict[str, Saving]] = {}, **changed) -> Replay:  # noqa: B006
    """A run with these savings, and those that are left beside features."""
    alone = Replay(
        3, 10.0, {}, 0.01, Saving("", 0.5), savings,
        lambda on: savings | beside.get("+".join(on), {}),
    )  # fmt: skip
    return replace(alone, **changed)


def test_a_replayed_run():
    result = replayed({"interstage": Saving("how", 1.0), "scaling": Saving("why")})
    advice = advice_of_replay(result, FEATURES, EXCLUDED)
    assert (advice.features, advice.overrides) == (("interstage",), FEATURES["interstage"].overrides)
    assert "observe mode alone saves 0.50 s of the 10.50 s that a step of stock verl would take" in advice.sentence
    assert advice_of_replay(replace(result, savings={}), FEATURES, EXCLUDED).features == ()
    # Less than the replay misses the recorded generation by, of 16 % of the step.
    missed = replace(result, stages={"gen": 8.0}, replay_error=0.2)
    assert advice_of_replay(missed, FEATURES, EXCLUDED).features == ("interstage",)
    for seconds, features in ((1.59, ()), (1.61, ("interstage",))):
        savings = {"interstage": Saving("how", seconds, replayed=True)}
        assert advice_of_replay(replace(missed, savings=savings), FEATURES, EXCLUDED).features == features


def test_savings_of_a_replayed_run_are_those_beside_the_features_before():
    savings = {name: Saving("", seconds) for name, seconds in (("old_log_prob", 2.0), ("interstage", 1.9))}
    savings |= {"share_prompts": Saving("", 1.5), "zero_gradient": Saving("", 0.5)}
    beside = {
        "old_log_prob": {"interstage": Saving("", 0.05), "share_prompts": Saving("", 0.3)},
        "old_log_prob+zero_gradient": {"share_prompts": Saving("", 0.2), "interstage": Saving("", 0.05)},
        "old_log_prob+zero_gradient+share_prompts": {"interstage": Saving("", 0.05)},
    }
    advice = advice_of_replay(replayed(savings, beside), FEATURES, EXCLUDED)
    assert advice.features == ("old_log_prob", "zero_gradient", "share_prompts")
    assert (advice.saved, advice.at_most) == (pytest.approx(2.7), False)
    assert advice.sentence == (
        "switch on old_log_prob (2.00 s a step, 20%), zero_gradient (0.50 s a step, 5%), share_prompts (0.20 s a step, "
        "2%); together 2.70 s a step, 27%; observe mode alone saves 0.50 s of the 10.50 s that a step of stock verl "
        "would take; interstage would gain less than 1% beside that"
    )
    some = advice_of_replay(replayed(savings, beside), FEATURES, EXCLUDED, FEATURES.keys() - {"old_log_prob"})
    assert some.features[0] == "interstage"
    assert "old_log_prob" not in some.sentence


def test_what_lengths_known_in_advance_would_save_is_a_bound():
    result = replayed({"scaling": Saving("why", 1.0, 0.3)})
    advice = advice_of_replay(result, FEATURES, EXCLUDED)
    assert "switch on scaling (at most 1.00 s a step, 10%, 30% less device time in all)" in advice.sentence
    assert (advice.saved, advice.at_most) == (1.0, True)
