"""Lengths of one step."""

import numpy as np
import pytest
from setups import grpo, ppo

from verl_fuse.simulate.draw import draw


@pytest.mark.parametrize("predictability", [0.0, 0.5, 1.0])
def test_responses_follow_the_distribution(predictability: float):
    workload = ppo(prompts=40_000)
    lengths = draw(workload, np.random.default_rng(0), predictability)
    assert lengths.response.mean() == pytest.approx(workload.response.mean, rel=0.03)
    for quantile in (0.1, 0.5, 0.9, 0.99):
        exact = np.searchsorted(np.cumsum(workload.response.probabilities), quantile)
        assert np.quantile(lengths.response, quantile) == pytest.approx(workload.response.values[exact], rel=0.05)


def test_samples_of_a_prompt_stand_together_and_share_its_length():
    lengths = draw(grpo(), np.random.default_rng(0), 0.8)
    assert lengths.group.tolist() == [i // 4 for i in range(256)]
    for values in (lengths.prompt, lengths.predicted):
        assert (values.reshape(64, 4) == values.reshape(64, 4)[:, :1]).all()
    assert not (lengths.response.reshape(64, 4) == lengths.response.reshape(64, 4)[:, :1]).all()


def test_perfect_predictions_order_the_lengths():
    lengths = draw(ppo(), np.random.default_rng(0), 1.0)
    assert (lengths.predicted == lengths.response).all()


def test_useless_predictions_are_all_the_same():
    assert len(set(draw(ppo(), np.random.default_rng(0), 0.0).predicted.tolist())) == 1
