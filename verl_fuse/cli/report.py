"""What a run achieved, read from the metrics file that verl's `file` logger writes: one JSON object {"step", "data"} a line."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from verl_fuse.errors import FuseError

TIMING = "timing_s/"
STEP = "step"
# Timed by verl beside the step, not within it (verl/trainer/ppo/v1/trainer_base.py).
OUTSIDE = ("testing",)


@dataclass(frozen=True)
class Change:
    """A validation metric: its first and last value, and the steps they belong to."""

    name: str
    before: float
    after: float
    first_step: int
    last_step: int


@dataclass(frozen=True)
class StageTime:
    """Mean seconds of one stage over the steps counted."""

    name: str
    seconds: float


def read_metrics(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """(step, numbers) per line, in the order written; a FuseError names the line that cannot be read."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            values = {key: float(value) for key, value in record["data"].items() if isinstance(value, int | float)}
            records.append((int(record["step"]), values))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FuseError(f"{path}, line {number}: not a metrics record ({error!r})") from error
    return records


def validation_changes(records: list[tuple[int, Mapping[str, float]]]) -> list[Change]:
    """First and last value of each validation accuracy and reward."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for step, values in records:
        for key, value in values.items():
            if key.startswith("val-") and ("/acc/mean" in key or "/reward/mean" in key) and math.isfinite(value):
                seen.setdefault(key, []).append((step, value))
    return [
        Change(key, points[0][1], points[-1][1], points[0][0], points[-1][0]) for key, points in sorted(seen.items())
    ]


def stage_times(records: list[tuple[int, Mapping[str, float]]]) -> tuple[int, list[StageTime]]:
    """(steps counted, mean seconds per stage, the step itself after its stages). The first step is left out where there are others: it warms everything up."""
    steps = [values for _, values in records if f"{TIMING}step" in values]
    counted = steps[1:] or steps
    sums: dict[str, float] = {}
    for values in counted:
        for key, value in values.items():
            if key.startswith(TIMING):
                sums[key] = sums.get(key, 0.0) + value
    # Stages that not every step has (validation, checkpoints) count as zero in the others.
    stages = [StageTime(key.removeprefix(TIMING), total / len(counted)) for key, total in sums.items()]
    return len(counted), sorted(stages, key=lambda stage: (stage.name in OUTSIDE, stage.name == STEP))


def summary(records: list[tuple[int, Mapping[str, float]]]) -> Group:
    """The two tables that `verl-fuse run` ends with."""
    changes = Table(title="Validation", title_justify="left")
    changes.add_column("metric", overflow="fold")
    for column in ("before", "after", "change"):
        changes.add_column(column, justify="right", no_wrap=True)
    for change in validation_changes(records):
        steps = (f"{change.before:.3f} (step {change.first_step})", f"{change.after:.3f} (step {change.last_step})")
        changes.add_row(change.name.partition("/")[2], *steps, f"{change.after - change.before:+.3f}")
    count, stages = stage_times(records)
    whole = next((stage.seconds for stage in stages if stage.name == STEP), 0.0)
    times = Table("stage", title=f"Step time, mean of {count} steps", title_justify="left")
    for column in ("seconds", "share"):
        times.add_column(column, justify="right")
    for stage in stages:
        share = "outside" if stage.name in OUTSIDE else f"{stage.seconds / whole:.0%}" if whole else ""
        times.add_row(stage.name, f"{stage.seconds:.3f}", share)
    return Group(changes, times)


def print_summary(console: Console, run_dir: Path, metrics: Path, page: Path) -> None:
    """Print what the run's files say, and where they are."""
    if metrics.is_file() and metrics.stat().st_size:
        console.print(summary(read_metrics(metrics)))
    for name, path in (("Timeline", page), ("Metrics", metrics), ("Run directory", run_dir)):
        if path.exists():
            console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)
