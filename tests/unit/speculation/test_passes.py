"""Shows the invariants of `verl_fuse_speculation.passes`."""

import os

import numpy as np
import pytest

from verl_fuse_speculation import passes as passes_module
from verl_fuse_speculation.passes import PASS, PASSES_SUFFIX, ForwardPass, Passes, append, in_tail, pass_costs


def rows(*counts: int) -> np.ndarray:
    return np.array([(0.0, 1, count, count, 0, 0.0) for count in counts], PASS)


def test_every_pass_is_read_once_and_a_half_written_one_when_it_is_whole(tmp_path):
    passes, path = Passes(tmp_path), tmp_path / f"a{PASSES_SUFFIX}"
    append(path, [ForwardPass(1.5, 3, 4, 6, 8, 0.25)])
    assert [tuple(one) for one in passes.news()["a"]] == [(1.5, 3, 4, 6, 8, 0.25)]
    assert passes.news() == {}
    append(path, [ForwardPass(2.5, 3, 4, 6, 8, 0.25)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert passes.news() == {}
    path.write_bytes(whole)
    assert [one["time"] for one in passes.news()["a"]] == [2.5]


def test_what_passes_cost_is_found_beside_those_that_waited():
    rng = np.random.default_rng(0)
    rows, drafted = np.arange(40, 0, -1), rng.integers(0, 30, 40)
    seconds = 0.02 + 0.001 * (rows + drafted)
    # One took in new samples, and one waited for a weight update.
    rows[20] += 30
    seconds[[20, 30]] += (0.5, 60.0)
    times = 1e9 + np.cumsum(seconds)
    found = np.array(
        [(time, 1, row, row, draft, 0.0) for time, row, draft in zip(times, rows, drafted, strict=True)], PASS
    )
    assert pass_costs([found, found[:3]]) == pytest.approx((0.02, 0.001), rel=1e-3)
    assert pass_costs([found[:9]]) is None
    alike = found.copy()
    alike["rows"], alike["drafted"] = 4, 0
    assert pass_costs([alike]) is None


def test_the_tail_is_what_follows_the_last_busy_pass():
    assert in_tail(rows(8, 8, 2, 5, 2, 1)).tolist() == [False] * 4 + [True] * 2
    assert in_tail(rows(1, 1)).tolist() == [False, False]
    assert in_tail(rows()).tolist() == []


@pytest.mark.parametrize(
    "damaged",
    [
        (float("nan"), 1, 4, 6, 8, 0.5),
        (float("inf"), 1, 4, 6, 8, 0.5),
        (1.0, -1, 4, 6, 8, 0.5),
        (1.0, 1, 0, 6, 8, 0.5),
        (1.0, 1, 4, 3, 8, 0.5),
        (1.0, 1, 4, 6, -1, 0.5),
        (1.0, 1, 4, 6, 8, -0.5),
        (1.0, 1, 4, 6, 8, float("nan")),
    ],
)
def test_a_damaged_file_is_named_once_and_left_after_the_passes_before(tmp_path, caplog, damaged):
    path, sound = tmp_path / f"a{PASSES_SUFFIX}", (1.5, 0, 1, 1, 0, 0.0)
    path.write_bytes(np.array([sound, damaged, sound], PASS).tobytes())
    append(tmp_path / f"b{PASSES_SUFFIX}", [ForwardPass(2.5, 3, 4, 6, 8, 0.25)])
    passes = Passes(tmp_path)
    assert {name: found.tolist() for name, found in passes.news().items()} == {
        "a": [sound],
        "b": [(2.5, 3, 4, 6, 8, 0.25)],
    }
    append(path, [ForwardPass(2.5, 3, 4, 6, 8, 0.25)])
    assert passes.news() == {}
    assert caplog.messages == [f"{path} is damaged, and left"]


def test_a_file_is_read_in_parts_and_what_is_no_file_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(passes_module, "MOST_BYTES", 2 * PASS.itemsize)
    append(tmp_path / f"a{PASSES_SUFFIX}", [ForwardPass(float(time), 3, 4, 6, 8, 0.25) for time in range(3)])
    os.mkfifo(tmp_path / f"b{PASSES_SUFFIX}")
    passes = Passes(tmp_path)
    assert [passes.news()["a"]["time"].tolist() for _ in range(2)] == [[0.0, 1.0], [2.0]]
