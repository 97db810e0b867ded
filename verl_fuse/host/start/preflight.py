"""Checks the configuration in the driver, before Ray or any worker is started.

The config group `fuse` installs this as a Hydra callback, so it also runs under verl's own `main_ppo`. Hydra turns
exceptions of callbacks into warnings; therefore a refusal leaves through SystemExit.
"""

import sys
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.start import require_contracts, require_version
from verl_fuse.host.start.resumption import nothing_left
from verl_fuse.host.start.set_by_plugins import as_started
from verl_fuse.host.start.settings import load_settings


class Preflight(Callback):
    """A callback that refuses an unsupported verl, a broken contract or a configuration that cannot run with one
    message and exit code 2, and ends a run that has nothing left to do with exit code 0; it prints the choices of
    `fuse.preset`, the keys that have no effect, and features that were measured to be slower."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            require_version()
            settings = load_settings(config, on_disk=True)
            require_contracts(settings.manager, as_started(config, settings))
            done = nothing_left(config)
            for line in (done,) if done else settings.notes:
                print(f"verl-fuse: {line}", file=sys.stderr, flush=True)
        except FuseError as error:
            print(f"verl-fuse: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error
        except Exception as error:
            traceback.print_exc()
            print("verl-fuse: the configuration could not be checked, see above", file=sys.stderr, flush=True)
            raise SystemExit(2) from error
        if done:
            raise SystemExit(0)
