"""Strategies side by side."""

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.errors import FuseError
from verl_fuse.simulate.compare import Comparison, compare, estimate
from verl_fuse.simulate.options import features_of
from verl_fuse.simulate.stock import stock_plan


def test_all_strategies_see_the_same_lengths():
    rows = compare(ppo(), h100(), ["interstage", "pipeline"], seeds=2, options=NO_POLL)
    assert [row.strategy for row in rows] == ["stock", "interstage", "pipeline"]
    first = rows[0].example.lengths
    assert all((row.example.lengths.response == first.response).all() for row in rows)
    assert rows[0].speedup.mean == rows[0].cost_ratio.mean == 1.0


def test_intervals_hold_the_mean():
    for row in compare(ppo(), h100(), ["interstage+pipeline+scaling"], seeds=4, options=NO_POLL):
        for value in (row.seconds, row.speedup, row.cost, row.cost_ratio):
            assert value.low <= value.mean <= value.high


def test_a_plan_is_needed_for_realloc():
    plan = stock_plan(ppo(), h100(), NO_POLL)
    given = compare(ppo(), h100(), ["realloc"], 1, plan, NO_POLL)
    assert [row.strategy for row in given] == ["stock", "realloc"]
    with pytest.raises(FuseError, match="strategy='realloc' needs --plan"):
        compare(ppo(), h100(), ["interstage", "realloc"], 1, None, NO_POLL)


def test_an_acceptance_is_needed_for_drafts():
    names = [row.strategy for row in compare(ppo(), h100(), seeds=1)]
    assert "speculation" not in names
    with pytest.raises(FuseError, match="strategy='speculation' needs --set acceptance=SHARE"):
        compare(ppo(), h100(), ["speculation"])
    with pytest.raises(FuseError, match="strategy='speculation' needs --set acceptance=SHARE"):
        compare(ppo(), h100(), ["streaming", "speculation"])


def test_strategies_add_up():
    strategies = ["zero_gradient+old_log_prob", "zero_gradient+old_log_prob+interstage"]
    rows = compare(grpo(zero_gradient=0.4), h100(), strategies, 1, None, NO_POLL)
    assert [row.strategy for row in rows] == ["stock", *strategies]
    assert rows[2].seconds.mean <= rows[1].seconds.mean < rows[0].seconds.mean
    assert features_of("interstage+stream") == {"interstage", "old_log_prob", "copies", "stream"}


def test_strategies_have_other_names():
    named = {"mine": "zero_gradient+old_log_prob+interstage", "again": "stock"}
    assert features_of("mine+speculation", named) == features_of("zero_gradient+old_log_prob+interstage+speculation")
    rows = list(Comparison(grpo(zero_gradient=0.4), h100(), None, 1, None, NO_POLL, named=named).rows())
    seconds = {row.strategy: row.seconds.mean for row in rows}
    assert list(seconds)[-2:] == ["mine", "again"]
    assert seconds["mine"] <= seconds["old_log_prob"] < seconds["again"] == seconds["stock"]
    with pytest.raises(FuseError, match=r"strategy='yours'; allowed: stock, .*placement, mine, again, or several"):
        features_of("yours", named)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("old_log_prob+fast", r"strategy='old_log_prob\+fast'; allowed: stock"),
        ("old_log_prob+realloc", "strategy='realloc' needs --plan"),
        ("interstage+speculation", r"strategy='interstage\+speculation' needs --set acceptance"),
    ],
)
def test_what_does_not_add_up_is_refused(strategy: str, words: str):
    with pytest.raises(FuseError, match=words):
        compare(grpo(), h100(), [strategy], 1, None, NO_POLL)


def test_one_value_has_no_interval():
    assert estimate(np.array([3.0])).low == 3.0


def test_a_ratio_is_one_of_sums():
    ratio = estimate(np.array([2.0, 6.0]), np.array([1.0, 3.0]))
    assert (ratio.mean, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
