"""Length distributions: text forms, moments, samples, and refusals."""

import numpy as np
import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.lengths import LengthDistribution

FORMS = (
    "fixed:512",
    "uniform:1-2048",
    "lognormal:median=400,sigma=1.0,max=2048",
    "bimodal:short=200,long=1600,share=0.1,sigma=0.3,max=2048",
)


@pytest.mark.parametrize("text", FORMS)
def test_text_forms_parse_back(text: str):
    lengths = LengthDistribution.parse(text)
    assert str(lengths) == text
    assert LengthDistribution.parse(str(lengths)) == lengths


@pytest.mark.parametrize("lengths", [*map(LengthDistribution.parse, FORMS), LengthDistribution.of([3, 1, 3])], ids=str)
def test_values_ascend_and_probabilities_sum_to_one(lengths: LengthDistribution):
    assert list(lengths.values) == sorted(set(lengths.values))
    assert lengths.values[0] >= 1
    assert min(lengths.probabilities) > 0
    assert sum(lengths.probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize("lengths", [*map(LengthDistribution.parse, FORMS), LengthDistribution.of([3, 1, 3])], ids=str)
def test_samples_have_the_moments(lengths: LengthDistribution):
    drawn = lengths.sample(np.random.default_rng(0), 200_000)
    assert drawn.dtype == np.int64
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert np.square(drawn).mean() == pytest.approx(lengths.mean_square, rel=0.02)
    assert set(np.unique(drawn)) <= set(lengths.values)


def test_moments_of_small_distributions():
    assert (LengthDistribution.parse("fixed:5").mean, LengthDistribution.parse("fixed:5").mean_square) == (5.0, 25.0)
    assert LengthDistribution.parse("uniform:1-3").mean_square == pytest.approx(14 / 3)
    observed = LengthDistribution.of([4, 4, 10])
    assert (observed.values, observed.mean, observed.maximum) == ((4, 10), 6.0, 10)


def test_the_tail_is_cut_to_the_maximum():
    lengths = LengthDistribution.parse("lognormal:median=400,sigma=1.0,max=400")
    assert lengths.maximum == 400
    assert lengths.probabilities[-1] == pytest.approx(0.5, abs=0.01)


def test_half_of_a_lognormal_lies_below_its_median():
    lengths = LengthDistribution.parse("lognormal:median=400,sigma=1.0,max=4096")
    shares = dict(zip(lengths.values, np.cumsum(lengths.probabilities), strict=True))
    assert shares[400] == pytest.approx(0.5, abs=0.001)
    # One standard deviation below, in logarithms.
    assert shares[147] == pytest.approx(0.1587, abs=0.001)


def test_equal_observations_are_equal_distributions():
    assert LengthDistribution.of([3, 1, 3]) == LengthDistribution.of([1, 3, 3])
    assert LengthDistribution.of([3, 1, 3]) != LengthDistribution.of([1, 1, 3])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512", "unknown form; allowed: fixed:512"),
        ("fixed:0", "needs a whole number from 1"),
        ("fixed:x", "needs a whole number from 1"),
        ("uniform:9-3", "needs a range"),
        ("lognormal:median=400", "needs exactly median, sigma, max, as in lognormal"),
        ("lognormal:median=400,sigma=0,max=10", "sigma=0; needs a number > 0"),
        ("lognormal:median=x,sigma=1,max=10", "'median=x'; needs key=number"),
        ("lognormal:median=400,sigma=1,max=2.5", "max=2.5; needs a whole number"),
        ("bimodal:short=2,long=9,share=2,sigma=1,max=9", "share=2; needs 0 to 1"),
    ],
)
def test_other_text_is_refused(text: str, message: str):
    with pytest.raises(FuseError, match=message):
        LengthDistribution.parse(text)


@pytest.mark.parametrize("observed", [[], [0], [2**23]])
def test_observations_must_be_lengths(observed: list[int]):
    with pytest.raises(FuseError, match="lengths: "):
        LengthDistribution.of(observed)
