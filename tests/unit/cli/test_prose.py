"""Prose fits the terminal, and a page where there is none."""

import pytest

from verl_fuse.cli.prose import say

TEXT = "Verdict: nothing differs beyond noise: " + "fused steps take 0.86 of stock; " * 6


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("200", 100)])
def test_lines_fit_the_terminal(
    columns: str, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    say(TEXT)
    lines = capsys.readouterr().out.splitlines()
    assert widest - 10 < max(map(len, lines)) <= widest
    assert " ".join(" ".join(lines).split()) == TEXT.strip()


def test_a_page_has_100_columns_whatever_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "60")
    say(TEXT)
    assert 90 < max(map(len, capsys.readouterr().out.splitlines())) <= 100
