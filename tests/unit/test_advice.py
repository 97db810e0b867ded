"""Advised features, and features that are not advised."""

from dataclasses import replace

from verl_fuse import plugins
from verl_fuse.advice import Gain, advice_of_replay, advice_of_rows, advise, chosen_of
from verl_fuse.cli.refused import excluded
from verl_fuse.feature import SWITCH
from verl_fuse.simulate.compare import Estimate, StrategyResult
from verl_fuse.simulate.recorded import Replay, Saving
from verl_fuse.simulate.threshold import Threshold

FEATURES = plugins.features(plugins.load())
EXCLUDED = excluded(None)


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


def test_the_gains_that_count_are_advised_the_largest_first():
    advice = advise(
        [gain("pipeline", 0.05), gain("streaming", 0.004), gain("interstage", 0.2)],
        FEATURES,
        EXCLUDED,
        "observe mode is on",
    )
    assert advice.features == ("interstage", "pipeline")
    assert advice.overrides == (*FEATURES["interstage"].overrides, *FEATURES["pipeline"].overrides)
    assert advice.sentence == (
        "switch on interstage (2.00 s a step, 20%), pipeline (0.50 s a step, 5%); observe mode is on; no gain is "
        "predicted from streaming"
    )


def test_where_nothing_gains_it_says_so():
    advice = advise(
        [gain("interstage", 0.009), gain("elastic", -0.2), gain("pipeline", 0.3, sure=False)],
        FEATURES,
        EXCLUDED,
        "observe mode is on",
    )
    assert (advice.features, advice.overrides) == ((), ())
    assert advice.sentence == "switch no feature on: none is predicted to gain 1% of a step; observe mode is on"


def test_of_two_that_exclude_each_other_the_better_one_is_advised():
    both = [gain("streaming", 0.05), gain("interstage", 0.2), gain("elastic", 0.1, 0.5)]
    assert [one.feature for one in chosen_of(both, FEATURES, EXCLUDED)] == ["interstage"]
    assert "streaming and elastic cannot be on together with that" in advise(both, FEATURES, EXCLUDED, "").sentence


def test_device_time_given_back_is_a_gain_and_its_price_is_told():
    advice = advise([gain("elastic", -0.03, 0.4)], FEATURES, EXCLUDED, "observe mode is on")
    assert advice.sentence == "switch on elastic (40% of device time given back, steps 3% longer); observe mode is on"


def test_strategies_are_compared_with_observe_mode_not_with_stock():
    rows = [
        row("stock", 10.0),
        row("observe", 8.0, 0.8),
        row("interstage", 7.95, 0.795),
        row("elastic", 8.0, 0.4),
        row("all", 4.0, 0.1),
    ]
    advice = advice_of_rows(rows, FEATURES, EXCLUDED)
    assert advice.features == ("elastic",)
    assert advice.overrides[: len(SWITCH)] == SWITCH
    assert "observe mode alone is 1.25 times as fast as stock [1.25, 1.25]" in advice.sentence
    assert advice_of_rows([rows[0], row("interstage", 7.0)], FEATURES, EXCLUDED).features == ("interstage",)


def test_a_streamed_update_gains_what_it_adds_to_the_pass_that_is_left_out():
    rows = [row("stock", 10.0), row("observe", 10.0), row("old_log_prob", 9.0), row("stream", 8.5)]
    advice = advice_of_rows(rows, FEATURES, EXCLUDED)
    assert advice.features == ("old_log_prob", "stream")
    assert "old_log_prob (1.00 s a step, 10%), stream (0.50 s a step, 5%)" in advice.sentence
    assert advice.overrides.count("fuse.update.skip_old_log_prob=true") == 1
    assert advice_of_rows([*rows[:3], row("stream", 9.0)], FEATURES, EXCLUDED).features == ("old_log_prob",)


def test_a_gain_within_its_interval_is_not_advised():
    rows = [row("stock", 10.0), row("observe", 8.0, spread=0.2), row("interstage", 7.8, spread=0.2)]
    assert advice_of_rows(rows, FEATURES, EXCLUDED).features == ()


def test_a_replayed_run():
    savings = {"interstage": Saving("how", 1.0), "elastic": Saving("why")}
    result = Replay(3, 10.0, {}, 0.01, Threshold(1, 1, 1.0, 1.0), Saving("", 0.5), savings)
    advice = advice_of_replay(result, FEATURES, EXCLUDED)
    assert (advice.features, advice.overrides) == (("interstage",), FEATURES["interstage"].overrides)
    assert "observe mode alone saves 0.50 s of the 10.50 s that a step of stock verl would take" in advice.sentence
    assert advice_of_replay(replace(result, savings={}), FEATURES, EXCLUDED).features == ()
    # Less than the replay misses the recorded generation by.
    assert advice_of_replay(replace(result, stages={"gen": 8.0}, replay_error=0.2), FEATURES, EXCLUDED).features == ()


def test_what_lengths_known_in_advance_would_save_is_a_bound():
    savings = {"elastic": Saving("why", 1.0, 0.3)}
    result = Replay(3, 10.0, {}, 0.01, Threshold(1, 1, 1.0, 1.0), Saving("", 0.5), savings)
    assert (
        "switch on elastic (at most 1.00 s a step, 10%, 30% of device time given back)"
        in advice_of_replay(result, FEATURES, EXCLUDED).sentence
    )
