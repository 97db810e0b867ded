"""Scaling to whole numbers."""

from verl_fuse.schedule.ticks import scale_for


def test_decimals_scale_exactly():
    scale = scale_for([1.95, 2.0, 0.0])
    assert scale.exact
    assert [scale.ticks(1.95), scale.ticks(2.0), scale.value(39)] == [39, 40, 1.95]


def test_irregular_numbers_are_rounded_and_say_so():
    scale = scale_for([3.141592653589793, 1.0])
    assert not scale.exact
    assert abs(scale.value(scale.ticks(1.0)) - 1.0) < 1e-3


def test_floor_forgives_float_noise():
    assert scale_for([0.1]).floor(0.1 + 0.2) == 3
    assert scale_for([0.1]).floor(0.39) == 3
    assert scale_for([0.0]).factor == 1
