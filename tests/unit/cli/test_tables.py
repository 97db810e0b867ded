"""Tables are never cut."""

import pytest
from rich.console import Console
from rich.table import Table

from verl_fuse.cli import tables

NUMBERS = ("4.3612345", "[1.337,", "1.338]", "0.00725")
NAME = "ppo-megatron-8gpu"


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(tables, "Console", lambda: Console(force_terminal=terminal, color_system=None))
    table = Table("strategy", title="a title of many words that does not fit into a narrow terminal")
    for column in ("step s", "speed-up", "device hours"):
        table.add_column(column, justify="right")
    table.add_row(NAME, NUMBERS[0], " ".join(NUMBERS[1:3]), NUMBERS[3])
    tables.print_table(table)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_number_and_name_is_whole(capsys, monkeypatch, width: int, terminal: bool):
    shown = printed(capsys, monkeypatch, width, terminal)
    for text in (NAME, *NUMBERS):
        assert any(text in line for line in shown), text
    assert "…" not in "".join(shown)


@pytest.mark.parametrize("width", [20, 80])
def test_in_a_pipe_a_row_is_one_line(capsys, monkeypatch, width: int):
    (row,) = [line for line in printed(capsys, monkeypatch, width, terminal=False) if NAME in line]
    assert all(number in row for number in NUMBERS)


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_that_is_wide_enough_for_the_words_is_not_overrun(capsys, monkeypatch, width: int):
    assert max(map(len, printed(capsys, monkeypatch, width, terminal=True))) <= width
