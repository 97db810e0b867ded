"""Read the record of a run: every step's numbers, verl's metrics, and the time and memory of the run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_fuse.cli.report import read_metrics
from verl_fuse.compare.run import RunMetrics
from verl_fuse.errors import FuseError

METRICS = "metrics.jsonl"
LOG = "log.txt"
NUMBERS = "numbers"
PARAMETERS = "parameters"
# One quantity of a step maps a row number, or rank and parameter name, to its numbers.
Quantity = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Step:
    """One step: whether its rollouts were recorded ones, seconds until the next step begins (None for the last), verl's
    metrics, and by name the quantities computed in the step."""

    replayed: bool
    seconds: float | None
    metrics: Mapping[str, float]
    numbers: Mapping[str, Quantity]


@dataclass(frozen=True)
class Record:
    """A run, `code` None if the run had to be ended; `note` is the end of its log when the run failed."""

    name: str
    code: int | None
    peak_bytes: int
    steps: Mapping[int, Step]
    note: str = ""

    @property
    def ending(self) -> str:
        return "did not end in time" if self.code is None else f"ended with exit code {self.code}"

    @property
    def replayed(self) -> dict[int, Step]:
        return {number: step for number, step in self.steps.items() if step.replayed}

    @property
    def live(self) -> dict[int, Step]:
        return {number: step for number, step in self.steps.items() if not step.replayed}


def read(name: str, code: int | None, peak_bytes: int, folder: Path, replayed: tuple[int, ...]) -> Record:
    """Return the record of a run in `folder`, with quantities for replayed steps only; of a failed run only the end of
    its log.

    Raises FuseError if the run ended well and yet the recorder has saved nothing.
    """
    if code != 0:
        return Record(name, code, peak_bytes, {}, (folder / LOG).read_text(errors="replace")[-3000:])
    metrics, numbers = RunMetrics.of(name, read_metrics(folder / METRICS)).steps, folder / NUMBERS
    try:
        times = periods(numbers)
        steps = {
            step: Step(step in replayed, times.get(step), values, quantities(numbers, step) if step in replayed else {})
            for step, values in metrics.items()
        }
    except FileNotFoundError as error:
        raise FuseError(f"{error.filename}: the run {name} ended well, but the recorder has not saved this") from error
    return Record(name, code, peak_bytes, steps)


def periods(folder: Path) -> dict[int, float]:
    """Return the seconds from the begin of each step to the begin of the next, from the recorder's notes."""
    begins = {
        line["step"]: line["time"] for line in map(json.loads, (folder / "begins.jsonl").read_text().splitlines())
    }
    return {step: begins[step + 1] - begin for step, begin in begins.items() if step + 1 in begins}


def quantities(folder: Path, step: int) -> dict[str, Quantity]:
    """Return every quantity that the recorder (ci/upstream/recorder) saved for a step: fields of the batch by row,
    parameters by rank and name."""
    import torch

    batch = torch.load(folder / f"batch_{step}.pt")
    found: dict[str, Quantity] = {
        field: {str(row): tensor.numpy() for row, tensor in enumerate(rows)} for field, rows in batch["rows"].items()
    }
    found["padding"] = {"rows": np.asarray(batch["padding"])}
    for file in sorted(folder.glob(f"*_{step}_rank*.pt")):
        role, _, rank = file.stem.split("_")
        tensors = {f"{rank}:{name}": tensor.numpy() for name, tensor in torch.load(file).items()}
        found[f"{role} {PARAMETERS}"] = {**found.get(f"{role} {PARAMETERS}", {}), **tensors}
    return found
