"""Keeps the configuration of a run in its folder: RUN_DIR/config.yaml, or the copy that Hydra left under RUN_DIR/hydra.

Invariants (tests/unit/spec/test_run_config.py):
- text under a key that names a secret, references to other keys excepted, the values of environment variables, and a
  password in an address are not written;
- all other values are written, and read back unchanged; a value that YAML cannot express (a path) reads back as text;
- a variable of the run's environment that is not set where the file is read stays text.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load, save

FILE = "config.yaml"
# Hydra's own copy, where hydra.run.dir is RUN_DIR/hydra, like in the recipes.
HYDRA_FILE = Path("hydra") / ".hydra" / "config.yaml"
FILES = (FILE, HYDRA_FILE)

REDACTED = "(left out)"
_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|password|passwd|credentials?|auth|token)s?($|_)", re.I
)
# Says where the value stands, as verl's lengths in tokens do, and is none itself.
_REFERENCE = re.compile(r"\$\{(oc\.select:)?[\w.]+(,\s*\d+)?\}")
_ENVIRONMENT = "env_vars"
_VARIABLE = re.compile(r"(?<![\\{.:,])\$\{oc\.env:\s*(\w+)\s*\}")
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
# Keys that a stock run and a fused run need not share, and keys of a run's folder, name and number of steps.
_MAY_DIFFER = (
    "fuse.",
    "hydra.",
    "recipe.",
    "trainer.v1.trainer_mode",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "trainer.resume",
)


def save_config(run_dir: Path, config: DictConfig) -> None:
    """Write the configuration, interpolations as they are; a FuseError if the disk refuses."""
    data = _without_secrets(OmegaConf.to_container(config, resolve=False, enum_to_str=True))
    save(run_dir / FILE, yaml.safe_dump(data, sort_keys=False))


def find_config(run_dir: Path) -> DictConfig | None:
    """Return the configuration of the run in that folder, or None where no file was kept; a FuseError names a
    file that cannot be read."""
    found = (_read(run_dir / name) for name in FILES)
    return next((config for config in found if config is not None), None)


def differences(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which the configurations of two runs differ, but for the block `fuse`, names, folders and the
    number of steps; empty where the runs have not both kept a file of the same kind. A key that only one run has counts
    as None in the other."""
    for name in (HYDRA_FILE, FILE):
        found = [_read(run_dir / name) for run_dir in (first, second)]
        if found[0] is not None and found[1] is not None:
            one, other = (dict(_leaves(OmegaConf.to_container(config, resolve=False))) for config in found)
            keys = sorted(key for key in one.keys() | other.keys() if not key.startswith(_MAY_DIFFER))
            return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}
    return {}


def _read(path: Path) -> DictConfig | None:
    return load(path, _parse) if path.is_file() else None


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{prefix}{name}.")
    else:
        yield prefix.removesuffix("."), value


def _parse(text: str) -> DictConfig:
    try:
        config = OmegaConf.create(_unset_as_text(yaml.safe_load(text)))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise FuseError(f"not a configuration: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise FuseError("not a configuration: needs a block of keys")
    return config


def _unset_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unset_as_text(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unset_as_text(item) for item in value]
    if not isinstance(value, str):
        return value
    return _VARIABLE.sub(lambda found: found[0] if found[1] in os.environ else f"\\{found[0]}", value)


def _without_secrets(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {
            name: REDACTED if key == _ENVIRONMENT else _without_secrets(item, str(name)) for name, item in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(item, key) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    # A path, for example.
    value = str(value)
    secret = value and _SECRET.search(key) and not _REFERENCE.fullmatch(value)
    return REDACTED if secret else _PASSWORD.sub(f"{REDACTED}@", value)
