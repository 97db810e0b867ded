import json
import math
from dataclasses import replace

import numpy as np
import pytest

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse_elastic.prediction import LengthPredictor, afterwards, calibration, rank_correlation


def prompt(key, source="math", samples=4):
    return Prompt(f"uid-{key}", key, source, samples)


def learned(*visits):
    predictor = LengthPredictor()
    for visit in visits:
        predictor.observe([visit])
    return predictor


def tokens(predictor, *prompts):
    return [prediction.tokens for prediction in predictor.predict(prompts)]


def test_nothing_is_predicted_before_anything_was_seen():
    assert LengthPredictor().predict([prompt("a")]) is None
    assert learned((prompt("a"), [])).predict([prompt("a")]) is None


def test_a_visited_prompt_is_predicted_from_its_own_visits_the_newest_counting_most():
    predictor = learned((prompt("a"), [100, 300]), (prompt("b"), [7, 7]), (prompt("a"), [60, 40]))
    assert tokens(predictor, prompt("a"), prompt("b")) == [0.5 * 50 + 0.5 * 200, 7.0]


def test_an_unseen_prompt_is_predicted_from_its_source():
    predictor = learned((prompt("a"), [100, 120, 140]), (prompt("b", "code"), [1000, 2000, 3000]))
    assert tokens(predictor, prompt("x"), prompt("y", "code")) == [120.0, 2000.0]
    (unseen,) = predictor.predict([prompt("y", "code")])
    assert unseen.upper == pytest.approx(2800.0)


def test_a_source_nobody_has_seen_is_predicted_from_all():
    predictor = learned((prompt("a"), [10, 20]), (prompt("b", "code"), [30]))
    assert tokens(predictor, prompt("x", "poems")) == [20.0]


def test_the_upper_length_of_a_visited_prompt_follows_earlier_errors():
    predictor = learned((prompt("a"), [100]), (prompt("a"), [50, 80, 100, 120, 200]))
    (found,) = predictor.predict([prompt("a")])
    assert found.upper / found.tokens == pytest.approx(np.quantile([0.5, 0.8, 1.0, 1.2, 2.0], 0.9))


def test_responses_that_only_became_shorter_leave_the_upper_length_at_the_mean():
    (found,) = learned((prompt("a"), [100]), (prompt("a"), [50])).predict([prompt("a")])
    assert found == Prediction(75.0, 75.0)


def test_nine_in_ten_samples_stay_below_upper_once_a_distribution_is_known():
    rng = np.random.default_rng(0)
    usual = {str(n): rng.lognormal(5, 0.8) for n in range(200)}
    predictor, prompts = LengthPredictor(), [prompt(key) for key in usual]

    def visit():
        return [(p, [max(1, int(usual[p.key] * rng.lognormal(0, 0.3))) for _ in range(8)]) for p in prompts]

    for _ in range(4):
        predictor.observe(visit())
    found = calibration(list(zip(predictor.predict(prompts), [lengths for _, lengths in visit()], strict=True)))
    assert found["fuse/elastic_upper_coverage"] == pytest.approx(0.9, abs=0.04)
    assert found["fuse/elastic_rank_correlation"] > 0.95


def test_rank_correlation_knows_order_ties_and_constants():
    def rho(first, second):
        return rank_correlation(np.array(first, float), np.array(second, float))

    assert rho([1, 2, 3], [10, 20, 500]) == pytest.approx(1.0)
    assert rho([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rho([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert rho([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rho([2, 2, 2], [1, 2, 3]) is None


def test_calibration_of_nothing_is_nothing():
    assert calibration([]) == {}
    assert calibration([(Prediction(3.0, 4.0), [])]) == {}
    assert calibration([(Prediction(3.0, 4.0), [4, 5])]) == {"fuse/elastic_upper_coverage": 0.5}


def test_afterwards_a_prompt_has_the_mean_and_the_longest_of_its_responses():
    known = prompt("k")
    found = afterwards({known.uid: known}, {known.uid: [2, 6, 4], "of another step": [9]})
    assert found == [replace(known, prediction=Prediction(4.0, 6))]
    assert afterwards({known.uid: known}, {known.uid: []}) == []


def test_the_state_survives_a_checkpoint():
    predictor = learned((prompt("a"), [100]), (prompt("a"), [50, 200]), (prompt("b", "code"), [9]))
    restored = LengthPredictor.from_dict(json.loads(json.dumps(predictor.to_dict())))
    asked = [prompt("a"), prompt("b", "code"), prompt("x"), prompt("y", "poems")]
    assert restored.predict(asked) == predictor.predict(asked)
    for state in (predictor, restored):
        state.observe([(prompt("a"), [70])])
    assert restored.to_dict() == predictor.to_dict()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"means": {"a": "x"}, "recent": {}, "errors": []},
        {"means": [], "recent": {}, "errors": []},
        {"means": {}, "recent": {"math": [math.inf]}, "errors": []},
        {"means": {}, "recent": {}, "errors": [None]},
    ],
)
def test_data_that_is_no_state_is_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError, OverflowError)):
        LengthPredictor.from_dict(data)
