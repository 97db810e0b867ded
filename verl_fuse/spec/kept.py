"""Keeps a plugin's knowledge beside verl's checkpoints: written with each checkpoint, read by the run that goes on from
it.

Lengths belong to the data, costs to replicas of so many devices.

Invariants (tests/unit/spec/test_kept.py):
- saved knowledge is loaded, its costs only by a run whose replicas have as many devices;
- a checkpoint without the file costs a warning, and the learning begins anew;
- a damaged file is an error that names the file and a way to go on;
- where the disk refuses, the checkpoint stays good without it.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.spec import files
from verl_fuse.spec.arrays import Ints

T = TypeVar("T")
VERSION = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept(Generic[T]):
    """The file `fuse_<plugin>.json` in a checkpoint's folder.

    `parse(lengths, costs)` makes the plugin's knowledge of the file's JSON data; `costs` is None where the file's costs
    are of other replicas. It may raise KeyError, TypeError, ValueError, AttributeError or OverflowError on data that
    the plugin did not write.
    """

    plugin: str
    parse: Callable[[Any, Any], T]

    def file(self, folder: Path) -> Path:
        """Return the path of the file."""
        return folder / f"fuse_{self.plugin}.json"

    def save(self, folder: Path, lengths: Any, costs: Any, devices: int) -> None:
        """Write both, JSON data, into a checkpoint's folder; `devices` are the devices of one replica."""
        data = {"version": VERSION, "devices": devices, "lengths": lengths, "costs": costs}
        try:
            files.save(self.file(folder), json.dumps(data))
        except FuseError as error:
            logger.error(
                "the lengths and costs that fuse.%s learned are not in this checkpoint: %s", self.plugin, error
            )

    def load(self, folder: Path | None, devices: int) -> T | None:
        """Return the knowledge in the checkpoint that the run goes on from; None for a new run, and where the
        checkpoint has no such file."""
        if folder is None:
            return None
        file = self.file(folder)
        if not file.exists():
            logger.warning("%s is not there: fuse.%s learns lengths and costs anew", file, self.plugin)
            return None
        found, measured_on = files.load(file, lambda text: self._parsed(text, devices))
        if measured_on != devices:
            logger.warning(
                "%s: its costs were measured on replicas of %s devices, this run's have %d: fuse.%s measures them anew",
                file, measured_on, devices, self.plugin,
            )  # fmt: skip
        return found

    def _parsed(self, text: str, devices: int) -> tuple[T, int]:
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"version={data['version']!r}, this release reads {VERSION}")
            measured_on = int(data["devices"])
            return self.parse(data["lengths"], data["costs"] if measured_on == devices else None), measured_on
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FuseError(
                f"not what fuse.{self.plugin} writes with a checkpoint ({type(error).__name__}: {error}); delete it to "
                "learn lengths and costs anew"
            ) from error


def measured(kind: type[T], costs: Mapping[str, Any] | None) -> T | None:
    """Return the `costs` of a file, the fields of a `kind` in seconds; None for None. Raise the errors of `amount`, or
    TypeError on other fields."""
    return None if costs is None else kind(**{name: amount(value) for name, value in costs.items()})


def amount(value: Any) -> float:
    """Return `value` of a file as a measured amount, finite and not below 0. Raise TypeError or ValueError where it is
    none."""
    found = float(value)
    if isinstance(value, str) or not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{value!r} where a finite number from 0 on is expected")
    return found


def whole(value: Any, least: int = 0) -> int:
    """Return `value` of a file as a whole number from `least` on. Raise TypeError, ValueError or OverflowError where it
    is none."""
    found = int(value)
    if isinstance(value, str | bool) or found != value or found < least:
        raise ValueError(f"{value!r} where a whole number from {least} on is expected")
    return found


def token_pairs(rows: Any) -> Ints:
    """Return `rows` of a file as (prompt, response) tokens of samples, one at least. Raise ValueError where they are
    none."""
    found = np.array(rows)
    if found.ndim != 2 or found.shape[1] != 2 or found.dtype != np.int64 or found.min() < 0:
        raise ValueError(f"{rows!s:.100} where pairs of prompt and response tokens are expected")
    return found
