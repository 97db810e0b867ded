"""Schedules kept on disk."""

from dataclasses import replace
from pathlib import Path

import pytest
from problems import two_ranks

from verl_fuse.schedule import cache
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget


def test_round_trip_per_problem_and_method(tmp_path):
    schedule = solve(two_ranks(2), "greedy", Budget(1))
    cache.store(tmp_path / "new", schedule)
    assert cache.load(tmp_path / "new", two_ranks(2), "greedy") == schedule
    assert cache.load(tmp_path / "new", two_ranks(3), "greedy") is None
    assert cache.load(tmp_path / "new", two_ranks(2), "serial") is None
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"microbatch": 1', '"microbatch": 0'),
        lambda text: "[]",
    ],
)
def test_a_corrupt_entry_is_ignored_with_a_warning(tmp_path, spoil):
    schedule = solve(two_ranks(2), "greedy", Budget(1))
    cache.store(tmp_path, schedule)
    entry = next(tmp_path.iterdir())
    entry.write_text(spoil(entry.read_text()))
    with pytest.warns(UserWarning, match="cached schedule ignored"):
        assert cache.load(tmp_path, two_ranks(2), "greedy") is None
    with pytest.warns(UserWarning, match="cached schedule ignored"):
        cache.store(tmp_path, schedule)
    assert cache.load(tmp_path, two_ranks(2), "greedy") == schedule


def test_a_worse_schedule_does_not_replace_a_better_one(tmp_path):
    good = solve(two_ranks(4), "greedy", Budget(1))
    bad = replace(solve(two_ranks(4), "serial", Budget(1)), method="greedy")
    assert good.makespan < bad.makespan
    cache.store(tmp_path, good)
    cache.store(tmp_path, bad)
    assert cache.load(tmp_path, two_ranks(4), "greedy") == good


def test_the_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    assert cache.default_folder() == tmp_path
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.default_folder() == Path("/somewhere/verl-fuse")


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=rf"schedule not cached: .*{folder}"):
        cache.store(tmp_path / folder, solve(two_ranks(2), "greedy", Budget(1)))
