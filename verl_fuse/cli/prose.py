"""Prints prose as wide as the terminal, but at most 100 columns.

Invariant (tests/unit/cli/test_prose.py): no line is longer than the terminal or 100 columns, unless the line is one
word.
"""

import textwrap

import typer
from rich.console import Console

from verl_fuse.cli.tables import PAGE, page_width


def say(text: str) -> None:
    """Print a line, broken between words; its continuation is indented."""
    width = min(page_width(Console()), PAGE)
    typer.echo(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
