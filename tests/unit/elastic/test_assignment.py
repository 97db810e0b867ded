from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse.spec.prompts import Prediction
from verl_fuse.testing import prompts as predicted
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.assignment import CROWD, TOKENS_ALONE, Line, assign

MEASURED = DecodeCost(0.02, 0.001)


def prompts(*tokens, samples=4, spread=1.5):
    return predicted(tokens, samples=samples, spread=spread)


def contiguous(wanted, count, slots, cost):
    line = Line(wanted, slots, cost)
    return [line.prompts[a:b] for a, b in pairwise(line.cut(count))]


def run_seconds(wanted, slots, cost):
    return Line(wanted, slots, cost).seconds(0, len(wanted))


def expected(prompt):
    return prompt.prediction.tokens


def lengths(runs):
    return [[expected(prompt) for prompt in run] for run in runs]


def test_neighbours_in_length_share_a_replica_and_tokens_are_balanced_not_requests():
    runs = contiguous(prompts(100, 10, 300, 10, 200, 500, 10, 60), 3, 64, TOKENS_ALONE)
    assert lengths(runs) == [[500], [300, 200], [100, 60, 10, 10, 10]]


def test_ranks_are_those_given_and_all_samples_of_a_prompt_go_together():
    found = assign(prompts(5, 400, 6), [2, 7], 64)
    assert found == {"u1": 2, "u2": 7, "u0": 7}


def test_prompts_without_a_prediction_count_as_equally_long():
    bare = predicted([None] * 6, samples=8)
    assert [len(run) for run in contiguous(bare, 3, 64, TOKENS_ALONE)] == [2, 2, 2]


def test_more_replicas_than_prompts():
    assert lengths(contiguous(prompts(5, 9), 4, 64, TOKENS_ALONE)) == [[9], [5]]
    assert assign([], [0, 1], 64) == {}


def test_a_decode_step_s_own_cost_gives_the_longest_prompts_less_company():
    by_tokens = contiguous(prompts(400, 100, 100, 100, 100), 2, 64, TOKENS_ALONE)
    by_time = contiguous(prompts(400, 100, 100, 100, 100, samples=32), 2, 64, DecodeCost(0.02, 0.0001))
    assert lengths(by_tokens) == lengths(by_time) == [[400], [100, 100, 100, 100]]


def test_the_shortest_prompts_do_not_all_crowd_one_replica():
    """Where a step costs the same at any size, all short ones together would be predicted to be the fastest."""
    runs = contiguous(prompts(900, 800, 700, *[10] * 9), 4, 640, DecodeCost(1.0, 0.0))
    assert [len(run) for run in runs] == [1, 1, 4, 6]


@pytest.mark.parametrize(
    ("tokens", "runs"),
    [
        ([300, 200, *[100] * 5], [[300, 200], [100] * 5]),
        ([900, *[100] * 8], [[900], [100] * 8]),
        ([100] * 5, [[100] * 3, [100] * 2]),
    ],
)
def test_a_run_that_is_cut_for_a_replica_without_one_is_cut_in_the_middle_of_its_tokens(tokens, runs):
    """Where a step costs the same at any size and lengths are certain, one replica would do."""
    assert lengths(contiguous(prompts(*tokens, spread=1.0), 2, 640, DecodeCost(1.0, 0.0))) == runs


def test_among_many_samples_one_is_far_above_its_prediction():
    cost = DecodeCost(1.0, 0.0)
    alone, many = (Line(prompts(100, samples=n), 640, cost) for n in (9, 99))
    assert alone.seconds(0, 1) == pytest.approx(150)
    assert 100 * 1.5**1.8 < many.seconds(0, 1) < 100 * 1.5**1.83
    assert Line(prompts(100, samples=99), 640, cost, limit=160).seconds(0, 1) == 160


def test_a_run_lasts_as_long_as_its_longest_response_or_its_slots_allow():
    assert run_seconds(prompts(100, samples=9), 64, DecodeCost(1.0, 0.5)) == pytest.approx(150 + 450)
    assert run_seconds(prompts(100, samples=64), 16, DecodeCost(1.0, 0.0)) == 400
    assert run_seconds([], 16, MEASURED) == 0.0


def test_afterwards_a_run_lasts_as_long_as_the_responses_that_were_generated():
    line = Line(prompts(100, 100, 100, samples=4), 8, DecodeCost(1.0, 0.5), each=2.0)
    a, b, _ = (prompt.uid for prompt in line.prompts)
    generated = {a: Prediction(10.0, 30.0), b: Prediction(20.0, 25.0)}
    assert line.afterwards(0, 2, generated) == 30.0 + 0.5 * (40.0 + 80.0) + 2.0 * 8
    assert line.afterwards(1, 3, generated) == 25.0 + 0.5 * 80.0 + 2.0 * 4, "the third prompt has no responses"
    assert Line(line.prompts, 2, DecodeCost(1.0, 0.0)).afterwards(0, 2, generated) == 120.0 / 2
    assert line.afterwards(2, 3, generated) == 0.0


@st.composite
def workloads(draw):
    tokens = draw(st.lists(st.floats(1, 2000), min_size=1, max_size=9))
    count = draw(st.integers(1, 4))
    return prompts(*tokens, samples=draw(st.integers(1, 8))), count, draw(st.sampled_from([TOKENS_ALONE, MEASURED]))


def crowded(run, wanted, count):
    return len(run) > 1 and sum(p.samples for p in run) > CROWD * sum(p.samples for p in wanted) / count


def fastest(ordered, count, cost):
    """The least time of the slowest run, over every way to cut into runs that are not crowded."""
    n = len(ordered)
    cuts = (cut for k in range(min(count, n)) for cut in combinations(range(1, n), k))
    runs = ([ordered[a:b] for a, b in pairwise((0, *cut, n))] for cut in cuts)
    allowed = (found for found in runs if not any(crowded(run, ordered, count) for run in found))
    return min(max(run_seconds(run, 16, cost) for run in found) for found in allowed)


@settings(deadline=None, max_examples=200)
@given(workloads())
def test_invariants(workload):
    wanted, count, cost = workload
    runs = contiguous(wanted, count, 16, cost)
    assert sorted(p.uid for run in runs for p in run) == sorted(p.uid for p in wanted)
    flat = [expected(p) for run in runs for p in run]
    assert flat == sorted(flat, reverse=True)
    assert len(runs) == min(count, len(wanted))
    ordered = [p for run in runs for p in run]
    assert not any(crowded(run, wanted, count) for run in runs)
    slowest = max(run_seconds(run, 16, cost) for run in runs)
    assert slowest <= fastest(ordered, count, cost) * 1.006


@pytest.mark.parametrize("count", [2, 8])
def test_every_replica_has_work_where_there_is_enough(count):
    assert len(contiguous(prompts(*[3] * 3, 9000, *[2] * 6), count, 64, MEASURED)) == count
