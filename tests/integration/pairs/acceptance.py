"""What verl-fuse says to a row before anything is started: the check that its Hydra callback makes in the
driver, in this process."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from table import Row, settings_of

from verl_fuse.cli.composition import compose
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.errors import FuseError
from verl_fuse.host.start.settings import load_settings

RECIPE = "ppo-cpu"


@contextmanager
def checking(home: Path) -> Iterator[DictConfig]:
    """The recipe's configuration, in an environment as `verl-fuse run` makes it."""
    given = {"VERL_FUSE_HOME": str(home), "VERL_PLATFORM": "cpu"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield compose(find_recipe(RECIPE), ["recipe.prepare=null"])
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def refusal(config: DictConfig, row: Row) -> str | None:
    """Why a run of this row would not start, or None."""
    # Half the time of a deep copy.
    asked = pickle.loads(pickle.dumps(config))
    for key, value in settings_of(row).items():
        OmegaConf.update(asked, key, value, force_add=True)
    try:
        load_settings(asked)
    except FuseError as error:
        return str(error)
    return None
