"""Reads observed lengths: a column of a CSV, JSONL or Parquet file, or the prompts or responses of a recorded run.

A column may hold whole numbers, or lists (token ids), which are counted.
"""

import csv
import importlib
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load, reason
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.timeline import REQUEST, Timeline


def read_lengths(path: Path, column: str) -> LengthDistribution:
    """Return the empirical distribution of a column, or of a run directory's "prompt" or "response";
    every error names the file."""
    if path.is_dir():
        return _recorded(path, column)
    readers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FuseError(f"{path}: needs a file ending in {', '.join(readers)}")
    try:
        return LengthDistribution.of(_length(value, row) for row, value in enumerate(reader(path, column), start=1))
    except OSError as error:
        raise FuseError(f"{path}: cannot be read: {reason(error)}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise FuseError(f"{path}: cannot be read: {error}") from error
    except FuseError as error:
        raise FuseError(f"{path}: {error}") from error


def lengths_from(text: str, base: Path = Path()) -> LengthDistribution:
    """Return the distribution named by the text form of `LengthDistribution`, or by `FILE#COLUMN` or `RUN_DIR#response`
    with the path relative to `base`."""
    name, mark, column = text.rpartition("#")
    return read_lengths(base / name, column) if mark else LengthDistribution.parse(text)


def requests_of(timelines: Iterable[Timeline]) -> tuple[LengthDistribution, LengthDistribution]:
    """Return the prompt and response lengths of the finished requests of a recorded run."""
    pairs = [
        (int(span.args["prompt_tokens"]), int(span.args["response_tokens"]))
        for timeline in timelines
        for span in timeline.spans
        if span.name == REQUEST and {"prompt_tokens", "response_tokens"} <= span.args.keys()
    ]
    if not pairs:
        raise FuseError("the recorded timelines hold no finished request")
    return LengthDistribution.of(prompt for prompt, _ in pairs), LengthDistribution.of(
        max(1, response) for _, response in pairs
    )


def _recorded(run_dir: Path, column: str) -> LengthDistribution:
    if column not in ("prompt", "response"):
        raise FuseError(f"{run_dir}: {column!r} of a recorded run; needs prompt or response")
    paths = sorted(run_dir.glob("timeline/step_*[0-9].json"))
    if not paths:
        raise FuseError(f"{run_dir}: no recorded step under timeline/")
    timelines, damaged = [], []
    for path in paths:
        try:
            timelines.append(load(path, Timeline.from_json))
        except FuseError as error:
            damaged.append(error)
    if not timelines:
        raise damaged[0]
    for error in damaged:
        warnings.warn(f"a recorded step is skipped: {error}", stacklevel=2)
    prompts, responses = requests_of(timelines)
    return prompts if column == "prompt" else responses


def _csv(path: Path, column: str) -> Iterator[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        _check_column(column, rows.fieldnames or ())
        for row in rows:
            yield row[column]


def _jsonl(path: Path, column: str) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                # The error need not be a JSONDecodeError: a number of thousands of digits is refused too.
                raise FuseError(f"line {number}: not JSON: {error}") from error
            except RecursionError as error:
                raise FuseError(f"line {number}: not JSON: nested too deeply") from error
            _check_column(column, row if isinstance(row, dict) else ())
            yield row[column]


def _parquet(path: Path, column: str) -> Iterator[Any]:
    # pyarrow comes with verl; the base install does without it.
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise FuseError("reading Parquet needs pyarrow: pip install pyarrow, or give a CSV or JSONL file") from error
    try:
        file = parquet.ParquetFile(path)
        _check_column(column, file.schema_arrow.names)
        for batch in file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
    except arrow.ArrowException as error:
        raise FuseError(f"not a whole Parquet file: {error}") from error


def _check_column(column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise FuseError(f"no column {column!r}; there is {', '.join(map(repr, columns)) or 'none'}")


def _length(value: Any, row: int) -> int:
    if isinstance(value, list):
        return len(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise FuseError(f"row {row}: {value!r}; needs a whole number, or a list of token ids") from None
    # Neither inf nor nan is a length.
    if not number.is_integer():
        raise FuseError(f"row {row}: {value!r}; needs a whole number")
    return int(number)
