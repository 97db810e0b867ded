"""Pictures: right suffix, self-contained, everything drawn."""

import builtins
import re

import pytest
from problems import PUBLISHED, published, two_ranks

from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.render import write_picture
from verl_fuse.schedule.render.curve import labels, memory_curve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.schedule import Schedule


@pytest.fixture
def schedule() -> Schedule:
    return solve(two_ranks(2, memory_limit=3.0), "back-to-back", Budget(1))


def test_memory_rises_at_forwards_and_falls_at_the_ends_of_backwards(schedule):
    row = tuple(op for op in schedule.rows[1] if op.pipeline == 0)
    assert [op.token for op in row] == ["0F0", "0B0", "0F1", "0B1"]
    assert memory_curve(schedule, row) == [(0.0, 0.0), (1.0, 1.0), (4.0, 1.0), (7.0, 0.0)]
    assert labels(schedule) == ["actor", "critic"]


def test_text_page(schedule, tmp_path):
    write_picture(schedule, tmp_path / "s.txt")
    text = (tmp_path / "s.txt").read_text()
    assert text.startswith("back-to-back: makespan 17 units of time (bound 12 units of time)")
    assert "A = actor  B = critic" in text
    assert text.endswith(schedule.to_text())


def test_page_is_self_contained_and_draws_every_op(schedule, tmp_path):
    write_picture(schedule, tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()
    drawn = [ops.split(",") for ops in re.findall('data-ops="(.+?)"', page)]
    assert drawn == [[f"{op.token} {op.start:g} {op.end:g}" for op in row] for row in schedule.rows]
    assert page.count("<path") == schedule.problem.ranks
    assert "bound 12" in page
    assert "<h1>Pipeline schedule of " in page
    assert f" on {schedule.problem.ranks} ranks</h1>" in page
    assert not re.search(r"https?://|<link|@import", page)
    assert page.count("<script") == 1


def test_the_page_of_a_large_schedule_stays_small(tmp_path):
    found = solve(published(PUBLISHED[11]), "back-to-back", Budget(1))
    assert len(found.ops) == 1024
    write_picture(found, tmp_path / "s.html")
    assert (tmp_path / "s.html").stat().st_size < 50_000


@pytest.mark.parametrize(("limit", "high", "drawn"), [(None, 2, False), (2.25, 2.25, True), (3.0, 2, False)])
def test_all_rows_of_memory_have_one_scale_which_a_near_limit_raises(tmp_path, limit, high, drawn):
    found = solve(two_ranks(2, memory_limit=limit), "back-to-back", Budget(1))
    assert found.peak_memory == 2
    write_picture(found, tmp_path / "s.html")
    _, memory = (tmp_path / "s.html").read_text().split("<h2>Activation memory by rank")
    assert f"each row is {high:g} units of memory high</h2>" in memory
    assert ('class="bound"' in memory) is drawn
    assert (", limit" in memory) is (limit is not None)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plots(schedule, tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    write_picture(schedule, tmp_path / f"s{suffix}")
    assert (tmp_path / f"s{suffix}").read_bytes().startswith(magic)
    assert len(list(tmp_path.iterdir())) == 1


def test_missing_matplotlib_and_unknown_suffix_say_what_to_do(schedule, tmp_path, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(FuseError, match=r"s.png: .png needs matplotlib: pip install .*\[plot\]'"):
        write_picture(schedule, tmp_path / "s.png")
    with pytest.raises(FuseError, match=r"suffix '.pdf'; allowed: .html, .png, .svg, .txt"):
        write_picture(schedule, tmp_path / "s.pdf")
