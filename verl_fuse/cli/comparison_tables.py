"""Prints a comparison as text, at most 100 columns wide."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from verl_fuse.cli.prose import say
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.compare.comparison import Comparison, Curve
from verl_fuse.compare.verdict import FACTS, SAMPLES, compared, difference_text, interval_text, verdict

BARS = "▁▂▃▄▅▆▇█"
# A curve has at most this many columns; a longer curve is averaged.
SPARKLINE_WIDTH = 60


def show(found: Comparison, remarks: Iterable[str], sentence: str | None, page: Path | None) -> None:
    """Print both runs, stages, curves, remarks and the verdict."""
    typer.echo(f"base:  {found.base.name}\nfused: {found.fused.name}")
    say(f"95 % intervals; {compared(found)}.")
    print_table(_runs(found))
    print_table(_stages(found))
    for curve in found.curves:
        _draw(curve)
    if page is not None:
        typer.echo(f"Page: {page}")
    for remark in remarks:
        say(f"Note: {remark}")
    if sentence is not None:
        say(sentence)
    say(f"Verdict: {verdict(found)}")


def _runs(found: Comparison) -> Table:
    table = Table("run", "base", "fused")
    table.add_row("seconds a step", interval_text(found.base.seconds), interval_text(found.fused.seconds))
    for label, fact in FACTS.items():
        base, fused = (
            fact(side) + (" asked for" if label == SAMPLES and side.stock and side.samples is not None else "")
            for side in (found.base, found.fused)
        )
        table.add_row(label, base, fused)
    return table


def _stages(found: Comparison) -> Table:
    table = Table("stage", *numbers("base s", "fused s", "fused - base, s"))
    for stage in (*found.stages, found.whole):
        table.add_row(
            escape(stage.name), f"{stage.base:.3f}", f"{stage.fused:.3f}", interval_text(stage.difference, 3, "+")
        )
    return table


def _draw(curve: Curve) -> None:
    values = [*curve.base.values(), *curve.fused.values()]
    low, high = min(values), max(values)
    typer.echo(
        f"{curve.name} ({curve.metric}), {low:.3g} to {high:.3g}; fused - base {difference_text(curve.difference)}"
    )
    steps = sorted(curve.base.keys() | curve.fused.keys())
    for label, side in (("base ", curve.base), ("fused", curve.fused)):
        typer.echo(f"  {label} {sparkline(side, steps, low, high)}")


def sparkline(points: Mapping[int, float], steps: list[int], low: float, high: float) -> str:
    """Return one character per step, or per few neighbouring steps; blank where there is no value."""
    line = ""
    for column in np.array_split(np.array(steps), min(SPARKLINE_WIDTH, len(steps))):
        values = [points[step] for step in column.tolist() if step in points]
        if not values:
            line += " "
            continue
        level = (sum(values) / len(values) - low) / (high - low) if high > low else 0.5
        line += BARS[min(int(level * len(BARS)), len(BARS) - 1)]
    return line
