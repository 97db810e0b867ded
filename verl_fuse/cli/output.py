"""Prints the output of every command that is asked for JSON: one object on stdout, and nothing else there. Notes go to
stderr."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text, and nothing else.")]


def print_json(data: Mapping[str, Any]) -> None:
    """Print one line. Numbers that JSON cannot write (infinity, not a number) become null."""
    typer.echo(json.dumps(_finite(data), allow_nan=False))


def note(line: str) -> None:
    """Print a line on stderr, beside the output."""
    typer.echo(f"verl-fuse: {line}", err=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite(value: float) -> float:
    """Refuse infinite values, which an option's bounds alone let pass; a callback of the option."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


def begun(context: typer.Context) -> float:
    """Return the start of the command (`time.monotonic`), imports included where the command is run from a shell."""
    return context.find_root().obj or time.monotonic()


def examples(*lines: str) -> str:
    """Return the end of a help text: commands to copy, each as wide as a terminal of 80 columns."""
    broken = [
        " \\\n".join(wrap(line, 74, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "))
        for line in lines
    ]
    return "\n".join(["Examples:", *(f"  {line}" for line in broken)])
