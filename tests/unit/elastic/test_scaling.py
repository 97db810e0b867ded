import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse.spec.prompts import Prediction
from verl_fuse.testing import prompts as predicted
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.assignment import Line
from verl_fuse_elastic.scaling import CANDIDATES, Forecast, Terms, choose, forecasts
from verl_fuse_elastic.scaling import forecast as one_forecast

DECODE = DecodeCost(0.02, 0.001)


def prompts(*tokens, samples=8):
    return predicted(tokens, samples=samples)


def forecast(wanted, terms, running=0, released=False):
    return forecasts(Line(wanted, 64, DECODE), terms, running, released=released)


def test_more_replicas_are_faster_and_dearer():
    found = forecast(prompts(*[200] * 16), Terms(0.5, 1, 4))
    assert [f.count for f in found] == [1, 2, 3, 4]
    seconds = [f.seconds for f in found]
    assert seconds == sorted(seconds, reverse=True)
    cost = [f.replica_seconds for f in found]
    assert cost == sorted(cost)
    assert found[0].seconds == found[0].replica_seconds == pytest.approx(0.02 * 200 * 2 + 0.001 * 200 * 128)


def test_released_replicas_cost_only_their_own_time():
    uneven = prompts(1000, 10, samples=1)
    held = forecast(uneven, Terms(0.5, 2, 2))[0]
    given_back = forecast(uneven, Terms(0.5, 2, 2), released=True)[0]
    assert held.replica_seconds == 2 * held.seconds
    assert given_back.replica_seconds == pytest.approx(held.seconds * 1.01)


def test_a_forecast_afterwards_has_the_same_runs_and_the_lengths_that_were_generated():
    wanted = prompts(1000, 10, samples=1)
    found = one_forecast(
        Line(wanted, 64, DECODE),
        2,
        Terms(0.5, 2, 2),
        2,
        released=True,
        generated={"u0": Prediction(10.0, 10.0), "u1": Prediction(500.0, 500.0)},
    )
    assert found.seconds == pytest.approx(0.021 * 500)
    assert found.replica_seconds == pytest.approx(0.021 * 510)


def test_a_replica_that_starts_holds_its_devices_before_it_generates():
    terms = Terms(0.5, 1, 3, start_seconds=7.0)
    cold, warm = (forecast(prompts(50, 50, 50), terms, running) for running in (1, 3))
    assert [c.replica_seconds - w.replica_seconds for c, w in zip(cold, warm, strict=True)] == pytest.approx(
        [0.0, 7.0, 14.0]
    )


def test_only_replicas_that_are_not_there_take_their_launch():
    terms = Terms(0.5, 1, 4, resident=2, launch_seconds=30.0)
    cold, warm = (forecast(prompts(50, 50, 50, 50), terms, running) for running in (1, 3))
    free = forecast(prompts(50, 50, 50, 50), Terms(0.5, 1, 4), 1)
    for found, launches in ((cold, [0, 0, 30, 60]), (warm, [0, 0, 0, 30])):
        assert [f.replica_seconds - g.replica_seconds for f, g in zip(found, free, strict=True)] == pytest.approx(
            launches
        )


def test_time_and_cost_pull_the_count_apart():
    found = forecast(prompts(*[300] * 12), Terms(0.0, 1, 6))
    assert choose(found, Terms(0.0, 1, 6), 0).count == 6
    assert choose(found, Terms(1.0, 1, 6), 0).count == 1
    assert 1 < choose(found, Terms(0.7, 1, 6), 0).count < 6


def test_a_long_tail_needs_no_more_replicas_than_its_longest_prompt_fills():
    found = forecast(prompts(4000, *[40] * 7, samples=1), Terms(0.0, 1, 8))
    assert choose(found, Terms(0.0, 1, 8), 0).count == 2, "more are no faster: the longest response takes what it takes"


def test_the_last_count_stays_unless_another_is_clearly_better():
    found = [Forecast(1, 10.0, 10.0), Forecast(2, 9.0, 10.5), Forecast(3, 8.9, 10.6)]
    time_only = Terms(0.0, 1, 3, hysteresis=0.05)
    assert choose(found, time_only, 2).count == 2
    assert choose(found, time_only, 1).count == 3
    assert choose(found, Terms(0.0, 1, 3), 2).count == 3
    assert choose(found, time_only, 9).count == 3, "a count that is no longer allowed is not kept"


def test_of_many_counts_some_are_looked_at_the_ends_and_the_last_one_among_them():
    counts = [f.count for f in forecast(prompts(*range(1, 200)), Terms(0.5, 1, 64), running=37)]
    assert len(counts) <= CANDIDATES + 1
    assert {1, 37, 64} <= set(counts)


def test_nothing_to_generate_needs_the_fewest():
    assert choose(forecast([], Terms(0.5, 1, 4)), Terms(0.5, 1, 4), 0).count == 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(1, 3000), min_size=1, max_size=12),
    st.floats(0, 1),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 9),
)
def test_invariants(tokens, weight, least, more, running):
    terms = Terms(weight, least, least + more)
    found = forecast(prompts(*tokens), terms, running)
    best = choose(found, terms, running)
    assert least <= best.count <= least + more

    def objective(f):
        return (1 - weight) * f.seconds / found[-1].seconds + weight * f.replica_seconds / found[-1].replica_seconds

    assert all(objective(best) <= objective(f) + 1e-9 for f in found)
    if weight == 0.0:
        assert best.seconds == min(f.seconds for f in found)
