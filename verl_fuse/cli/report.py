"""Reads the results of a run from the metrics file that verl's `file` logger writes: one JSON object
{"step", "data"} a line."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Column, Table

from verl_fuse.cli.tables import numbers
from verl_fuse.compare.run import BESIDE, METRICS_FILE, OTHER, RunMetrics, stage_seconds
from verl_fuse.errors import FuseError
from verl_fuse.spec.files import read_text
from verl_fuse.timeline.tracks import totals

# The argument that makes verl write the file.
LOGGER_KEY = "trainer.logger"
LOGGER = f"{LOGGER_KEY}=[console,file]"
STEP_STAGE = "step"
# A metric of the plugin interstage, logged for every step of a run whose finished samples are streamed.
OVERLAP_METRIC = "fuse/overlap_seconds"
# An unreadable line is shown up to this many characters.
MOST_CHARACTERS_SHOWN = 40


@dataclass(frozen=True)
class Change:
    """A validation metric: its first and last value, and the steps they belong to."""

    name: str
    before: float
    after: float
    first_step: int
    last_step: int


def read_metrics(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Return (step, numbers) per line, in the order written; a FuseError names the line that cannot be read."""
    return [
        (step, {key: _number(value) for key, value in data.items() if isinstance(value, int | float)})
        for step, data in read_records(path)
    ]


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, all values logged of the step) per line; a FuseError names the file, or the line, that cannot be
    read."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            record = json.loads(line)
            yield int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise FuseError(
                f'{path}, line {number}: not a metrics record, {{"step": 1, "data": {{...}}}}: '
                f"{line[:MOST_CHARACTERS_SHOWN]!r}"
            ) from error


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        # An integer beyond all floats; JSON's 1e999 is infinite as well.
        return math.inf if value > 0 else -math.inf


def logged(run_dir: Path) -> RunMetrics:
    """Return what a run logged into its folder; of a run without the file, no step."""
    file = run_dir / METRICS_FILE
    return RunMetrics.of(run_dir.name, read_metrics(file) if file.is_file() else ())


def validation_changes(run: RunMetrics) -> list[Change]:
    """Return the first and last value of each validation accuracy and reward."""
    found = []
    for key in run.validations:
        points = list(run.metric(key).items())
        found.append(Change(key, points[0][1], points[-1][1], points[0][0], points[-1][0]))
    return found


def stage_times(run: RunMetrics) -> tuple[int, dict[str, float]]:
    """Return (steps counted, mean seconds per stage, then of the time in no stage, of the step itself, and of the
    stages timed outside of the step). The first step, which warms everything up, is left out where there are others."""
    counted = run.timed[1:] or run.timed
    sums = totals(item for step in counted for item in stage_seconds(run.steps[step]).items())
    # Stages that not every step has (validation, checkpoints) count as zero in the others.
    means = {name: total / len(counted) for name, total in sums.items()}
    step = means.pop(STEP_STAGE, None)
    outside = {name: means.pop(name) for name in BESIDE if name in means}
    if step is not None:
        means |= {OTHER: max(0.0, step - sum(means.values())), STEP_STAGE: step}
    return len(counted), means | outside


def summary(run: RunMetrics) -> Group:
    """Return the last lines of `verl-fuse run`: validation, if there was any, the stages of a step, and the mean
    seconds a step of inference that ran while samples were still generated."""
    parts: list[Table | str] = []
    if changes := validation_changes(run):
        parts.append(_validation(changes))
    count, stages = stage_times(run)
    if count:
        parts.append(_times(count, stages))
    if hidden := sum(run.steps[step].get(OVERLAP_METRIC, 0.0) for step in run.timed[-count:]) / max(1, count):
        parts.append(f"Hidden: {hidden:.3f} s of inference a step ran while samples were still generated.")
    return Group(*parts)


def _validation(changes: list[Change]) -> Table:
    figures = [Column(header, justify="right", no_wrap=True) for header in ("before", "after", "change")]
    table = _table("Validation", Column("metric", overflow="fold"), *figures)
    for change in changes:
        before, after = (
            f"{change.before:.3f} (step {change.first_step})",
            f"{change.after:.3f} (step {change.last_step})",
        )
        once = change.first_step == change.last_step
        shown = (before, "", "") if once else (before, after, f"{change.after - change.before:+.3f}")
        table.add_row(change.name.partition("/")[2], *shown)
    return table


def _table(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _times(count: int, stages: Mapping[str, float]) -> Table:
    whole = stages.get(STEP_STAGE, 0.0)
    times = _table(f"Step time, mean of {count} step{'s' * (count > 1)}", "stage", *numbers("seconds", "share"))
    for name, seconds in stages.items():
        share = "outside" if name in BESIDE else f"{seconds / whole:.0%}" if whole else ""
        times.add_row(name, f"{seconds:.3f}", share)
    return times


def print_summary(console: Console, metrics: Path) -> None:
    """Print a summary of the run's metrics, if it logged any."""
    if metrics.is_file() and metrics.stat().st_size:
        console.print(summary(RunMetrics.of("", read_metrics(metrics))))
