"""Reads and writes the measurements of `verl-fuse profile`.

Invariants (tests/unit/cost/test_table.py):
- `ProfileTable.from_json(table.to_json())` gives an equal table;
- every measured time is positive, and a measurement has one time for every pair of its batches and lengths;
- a file of another version, or with an unknown key or value, is refused, naming it and the allowed values.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_fuse.cost.calibration import EngineFloors
from verl_fuse.cost.grid import MeasuredGrid
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Device
from verl_fuse.spec.files import load, save
from verl_fuse.spec.model import Model

TABLE_VERSION = 1

Part = Literal["embedding", "block", "head"]
Pass = Literal["forward", "backward", "decode"]
PARTS: tuple[tuple[Part, Pass], ...] = (
    ("embedding", "forward"),
    ("block", "forward"),
    ("block", "backward"),
    ("block", "decode"),
    ("head", "forward"),
    ("head", "backward"),
    ("head", "decode"),
)
"""The measured parts of a model. In a decode pass a length is the context that is there already, and each
sequence gets one new token."""


@dataclass(frozen=True)
class Measurement:
    """The seconds that one part of a model takes in one pass, for every batch size and sequence length, without
    collectives."""

    part: Part
    direction: Pass
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        where = f"profile, {self.part} {self.direction}"
        for name in ("batches", "lengths"):
            axis = getattr(self, name)
            if not axis or any(value < 1 for value in axis) or list(axis) != sorted(set(axis)):
                raise FuseError(f"{where}: {name}={list(axis)}; needs ascending whole numbers >= 1")
        if len(self.seconds) != len(self.batches) or any(len(row) != len(self.lengths) for row in self.seconds):
            raise FuseError(f"{where}: needs {len(self.batches)} x {len(self.lengths)} times")
        wrong = [value for row in self.seconds for value in row if not (math.isfinite(value) and value > 0)]
        if wrong:
            raise FuseError(f"{where}: {wrong[0]!r} seconds; needs finite numbers > 0")

    @property
    def grid(self) -> MeasuredGrid:
        return MeasuredGrid(np.array(self.batches, float), np.array(self.lengths, float), np.array(self.seconds))


@dataclass(frozen=True)
class MeasuredModel:
    """One model's shard on one of `tp` tensor ranks, and elements per second of its optimizer."""

    model: Model
    tp: int
    optimizer_rate: float
    measurements: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        found = [(m.part, m.direction) for m in self.measurements]
        missing = [" ".join(pair) for pair in PARTS if found.count(pair) != 1]
        if missing:
            raise FuseError(f"profile of {self.model.name}: needs one measurement of {', '.join(missing)}")
        if not (math.isfinite(self.optimizer_rate) and self.optimizer_rate > 0):
            raise FuseError(f"profile of {self.model.name}: optimizer_rate={self.optimizer_rate!r}; needs a number > 0")


@dataclass(frozen=True, eq=False)
class ProfileTable:
    """Measurements on `device`; `engine` holds the floors of the software around it, read
    off recorded runs, or None."""

    device: Device
    precision: str
    threads: int
    models: tuple[MeasuredModel, ...]
    engine: EngineFloors | None = None
    sources: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"version": TABLE_VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ProfileTable":
        """Parse `to_json` output; a FuseError names the fault of any other text."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise FuseError(f"not a verl-fuse profile: {error}") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != TABLE_VERSION:
            raise FuseError(f"profile version {version!r}; this release reads {TABLE_VERSION}")
        return read_block(cls, {key: value for key, value in data.items() if key != "version"}, "profile")

    @classmethod
    def read(cls, path: Path) -> "ProfileTable":
        """Read a profile; every error names the file."""
        return load(path, cls.from_json)

    def write(self, path: Path) -> None:
        """Write the JSON form, to a temporary file first."""
        save(path, self.to_json() + "\n")
