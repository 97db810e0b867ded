"""Reads YAML by OmegaConf's rules, so that 1e12 is a number and a key given twice is refused."""

from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import read_text

# In bytes: more than a person writes.
MOST_YAML_BYTES = 2**20


def read_yaml(path: Path) -> Any:
    """Return the contents as plain dicts, lists and values; every error names the file, in one line."""
    try:
        return parse_yaml(read_text(path, MOST_YAML_BYTES))
    except FuseError as error:
        message = str(error)
        raise FuseError(message if message.startswith(str(path)) else f"{path}: {message}") from error


def parse_yaml(text: str, *, resolve: bool = True) -> Any:
    """Parse text of YAML into plain dicts, lists and values; interpolations are left as they are without `resolve`."""
    try:
        return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=resolve)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FuseError(f"not YAML: {error.problem or error.context}{where}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise FuseError(f"not YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        # OmegaConf raises this for a file that holds one number.
        raise FuseError("needs a block of keys") from error
    except RecursionError as error:
        raise FuseError("not YAML: nested too deeply") from error
