"""Tables of decode and prefill costs."""

import numpy as np
import pytest
from timings import linear_prefill, roofline_decode, roofline_timing

from verl_fuse.errors import FuseError
from verl_fuse.simulate.replica_kernel import decode_seconds, prefill_seconds
from verl_fuse.simulate.timing import ReplicaTiming


def test_a_table_agrees_with_its_cost_at_grid_points():
    timing = roofline_timing()
    for batch in (1, 17, 256):
        for column in (0, 5, 256):
            context = column * timing.spacing
            assert timing.decode[batch, column] == pytest.approx(float(roofline_decode(batch, batch * context)))
            assert timing.step_seconds(batch, context) == pytest.approx(float(roofline_decode(batch, batch * context)))


def test_integrated_steps_agree_with_their_sum():
    timing = roofline_timing()
    for batch, context, steps in [(1, 0.0, 2900), (60, 411.3, 77), (256, 100.5, 2000), (200, 1234.5, 1)]:
        summed = sum(float(roofline_decode(batch, batch * (context + step))) for step in range(steps))
        integrated = decode_seconds(timing.decode, timing.integral, timing.spacing, batch, context, steps)
        assert integrated == pytest.approx(summed, rel=0.01)


def test_prefill_is_linear_in_requests_and_tokens_plus_the_squares_of_attention():
    def prefill(sequences, tokens):
        return 0.5 + 0.03 * sequences + 0.01 * sequences * tokens + 1e-5 * sequences * tokens**2

    t = ReplicaTiming.build(lambda s, n: 1.0 + 0 * n, prefill, max_batch=4, kv_capacity=4000, longest=4000)
    for count, each in [(1, 100), (1, 4000), (30, 250)]:
        seconds = prefill_seconds(
            count,
            count * each,
            count * each**2,
            t.prefill_tokens,
            t.prefill_seconds,
            t.request_seconds,
            t.square_seconds,
        )
        assert seconds == pytest.approx(prefill(count, each), rel=2e-3)


def test_costs_that_are_none_are_refused():
    with pytest.raises(FuseError, match="decode cost"):
        ReplicaTiming.build(lambda s, t: 0 * t, linear_prefill, max_batch=2, kv_capacity=100, longest=100)
    with pytest.raises(FuseError, match="prefill cost"):
        ReplicaTiming.build(lambda s, t: 1 + 0 * t, lambda s, n: np.nan, max_batch=2, kv_capacity=100, longest=100)


def test_a_pipeline_that_few_sequences_do_not_fill_is_no_cost_of_requests():
    depth = 126  # the blocks of the deepest model that has a name (llama-3.1-405b), one to a stage

    def prefill(sequences, tokens):
        parts = min(depth, sequences)
        return (depth + parts - 1) * (1e-3 + 1e-6 * sequences * tokens / parts)

    timing = ReplicaTiming.build(lambda s, n: 1.0 + 0 * n, prefill, max_batch=4, kv_capacity=4000, longest=4000)
    assert timing.request_seconds == pytest.approx(0.0, abs=1e-9)
    assert timing.prefill_seconds.min() > 0
