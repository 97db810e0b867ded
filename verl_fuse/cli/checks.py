"""Checks a run before anything is started, made or renamed, whether the run then starts or is printed (`--dry-run`)."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.composition import select
from verl_fuse.errors import FuseError
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.set_by_plugins import as_started
from verl_fuse.host.start.settings import load_settings
from verl_fuse.host.switch import NOTE, switched_off
from verl_fuse.spec.block import quoted

PARQUET_MAGIC = b"PAR1"


def problems_of(config: DictConfig, environment: Mapping[str, str]) -> tuple[list[str], tuple[str, ...]]:
    """Return (every problem that keeps a run with this configuration and environment from starting, the notes that the
    user reads at the start)."""
    if switched_off():
        return [], (NOTE,)
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if mode == TRAINER_MODE and "fuse" not in config:
        without = "trainer.v1.trainer_mode=fuse needs the block that ~fuse takes away: for stock verl use --baseline"
        return [without], ()
    with _variables(environment):
        try:
            settings = load_settings(config, starting=True)
            as_started(config, settings)
            return [], settings.notes
        except FuseError as error:
            return list(map(str, error.args)), ()


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that the run will have, within the block; checks read them as the run does."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def data_files(config: DictConfig) -> Iterator[str]:
    """Yield the local files of data.train_files and data.val_files."""
    for key in ("data.train_files", "data.val_files"):
        value = select(config, key)
        files = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise FuseError(f"{key}={quoted(value)}: needs a path, a list of paths, or null")
        yield from (file for file in files if "://" not in file)


def check_data_file(file: str) -> None:
    """Raise a FuseError unless `file` can be read and, if its name ends so, looks like Parquet."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            start = opened.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise FuseError(
            f"data file {path} cannot be read: {error.strerror} (data.train_files, data.val_files)"
        ) from error
    if path.suffix == ".parquet" and start != PARQUET_MAGIC:
        raise FuseError(f"data file {path} is not a Parquet file: it starts with {start!r}, not {PARQUET_MAGIC!r}")
