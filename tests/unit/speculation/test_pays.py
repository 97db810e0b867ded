"""Shows the invariants of `verl_fuse_speculation.pays`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse_speculation.pays import NEEDED, NEVER, Pays


def run(fixed: float, each: float, rows: int, *, tried: int = 4, expected: float = 3, accepted: int = 3) -> Pays:
    """Passes of about `rows` samples."""
    pays, rng = Pays(), np.random.default_rng(0)
    for _ in range(200):
        here, draft = max(1, rows + int(rng.integers(-rows // 2, rows // 2 + 1))), int(rng.integers(0, 2 * tried))
        share = draft / tried
        pays.observe(fixed + each * (here + draft), here, draft, round(accepted * share), expected * share)
    return pays


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1.0), st.floats(1e-6, 1e-2), st.integers(2, 200))
def test_the_costs_of_passes_are_found(fixed, each, rows):
    assert run(fixed, each, rows).costs == pytest.approx((fixed, each), rel=1e-3)


def test_nothing_is_known_before_there_were_passes():
    pays = Pays()
    for _ in range(NEEDED - 1):
        pays.observe(1.0, 4, 2, 1, 1.0)
    assert pays.costs is None
    assert pays.least == NEVER


def test_a_pass_that_waited_for_something_else_moves_the_costs_little():
    calm, disturbed = run(4e-3, 2e-4, 8), run(4e-3, 2e-4, 8)
    for pays, waited in ((calm, 0.0), (disturbed, 3.0)):
        pays.observe(4e-3 + 2e-4 * 8 + waited, 8, 0, 0, 0.0)
    assert disturbed.least < 1.5 * calm.least
    assert disturbed.costs[0] == pytest.approx(calm.costs[0], rel=0.1)


def test_costs_that_rise_are_found():
    pays = run(4e-3, 2e-4, 8)
    for tokens in [4, 8, 12, 16] * 200:
        pays.observe(4e-2 + 2e-3 * tokens, tokens, 0, 0, 0.0)
    assert pays.costs == pytest.approx((4e-2, 2e-3), rel=0.05)


def test_a_busy_device_gets_no_drafts_and_an_idle_one_all_of_them():
    # 200 samples of 1 ms each beside 1 ms for the pass: a token that is tried costs what one is worth.
    assert run(1e-3, 1e-3, 200, tried=20, expected=6, accepted=6).least > 0.9
    assert run(1e-1, 1e-5, 4).least == NEVER


def test_between_the_two_a_draft_must_earn_its_cost():
    found = run(1e-2, 1e-3, 8)
    _, each = found.costs
    assert NEVER < found.least < 1
    assert found.least < run(1e-2, 1e-3, 40).least
    # At this speed, a token takes so long.
    assert found.least == pytest.approx(each * found._speed, rel=0.1)


def test_drafts_that_disappoint_need_more_votes():
    assert run(1e-2, 1e-3, 8, expected=6, accepted=3).least > 1.5 * run(1e-2, 1e-3, 8, expected=3, accepted=3).least
