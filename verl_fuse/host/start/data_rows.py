"""Checks that the training data fills a batch: verl drops a batch that is not full, and divides by the number of whole
batches when its workers are up (`PPOTrainer._init_dataloader`, `PPOTrainer.fit`).

Invariant (tests/unit/host/test_data_rows.py): rows are counted from the footers of local Parquet files alone; a file of
another kind, or one that is missing, and a dataset class of the user's are left to verl. Prompts that verl leaves out
as too long are counted, so a run has no more rows than are said here.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_fuse.spec.composed import Get, getter, is_legacy, is_validation_only
from verl_fuse.spec.step import Refusal

_BATCH, _MOST = "data.train_batch_size", "data.train_max_samples"


def row_refusals(config: DictConfig) -> Iterator[Refusal]:
    """Refuse training data with fewer rows than a batch."""
    get = getter(config)
    batch, rows = get(_BATCH), rows_at_most(get)
    if is_legacy(config) or is_validation_only(get) or not isinstance(batch, int) or rows is None or rows >= batch:
        return
    if rows == get(_MOST):
        yield Refusal(_MOST, rows, f"a batch has {_BATCH}={batch} prompts: needs as many or more, or -1 for all")
    else:
        allowed = f"data.train_files has {rows} prompts, and verl drops a batch that is not full: needs at most {rows}"
        yield Refusal(_BATCH, batch, f"{allowed}, or more prompts")


def rows_at_most(get: Get) -> int | None:
    """Return a number of prompts that the run's training data does not exceed; None where this is not known."""
    if get("data.custom_cls.path") is not None:
        return None
    files, most = get("data.train_files"), get(_MOST)
    counted = [_rows(file) for file in (files if isinstance(files, list | ListConfig) else [files])]
    known = [sum(count for count in counted if count is not None)] if None not in counted else []
    if isinstance(most, int) and most > 0:
        known.append(most)
    return min(known, default=None)


def _rows(file: object) -> int | None:
    """Return the number of rows by the footer of a Parquet file; None for any other file."""
    if not isinstance(file, str) or not file.endswith(".parquet") or not (path := Path(file).expanduser()).is_file():
        return None
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        return None
    try:
        return parquet.read_metadata(path).num_rows
    except (OSError, arrow.ArrowException):
        # `verl-fuse run` names a damaged file before verl starts.
        return None
