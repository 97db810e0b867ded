"""Reads a YAML file as OmegaConf does, so that 1e12 is a number and a key given twice is refused."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.errors import FuseError


def read_yaml(path: Path) -> Any:
    """The contents as plain dicts, lists and values; every error names the file."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError) as error:
        raise FuseError(f"{path}: cannot be read: {error}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise FuseError(f"{path}: not YAML: {error}") from error
