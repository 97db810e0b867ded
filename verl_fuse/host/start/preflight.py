"""Checks the configuration in the driver, before Ray or any worker is started.

The config group `fuse` installs this as a Hydra callback, so it also runs under verl's own `main_ppo`. Hydra turns
exceptions of callbacks into warnings; therefore a refusal leaves through SystemExit. What checks is imported by the
check: with VERL_FUSE=off nothing of it is loaded.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.switch import reach_workers, switched_off


class Preflight(Callback):
    """A callback that refuses an unsupported verl, a broken contract or a configuration that cannot run with one
    message and exit code 2, and ends a run that has nothing left to do with exit code 0; it prints the choices of
    `fuse.preset`, the keys that have no effect, and features that were measured to be slower."""

    def on_job_start(self, config: DictConfig, task_function: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        try:
            if switched_off():
                _say(reach_workers(OmegaConf.select(config, "ray_kwargs.ray_init.address", default=None)))
                return
            done, notes = _checked(config, own_program=_is_own(task_function))
            _say(*((done,) if done else notes))
        except FuseError as error:
            _say(str(error))
            raise SystemExit(2) from error
        except Exception as error:
            traceback.print_exc()
            _say("the configuration could not be checked, see above")
            raise SystemExit(2) from error
        # Of several jobs (`--multirun`) the exit would end all; verl itself ends this one at once.
        if done and OmegaConf.select(config, "hydra.mode", default=None) != RunMode.MULTIRUN:
            raise SystemExit(0)


def _checked(config: DictConfig, *, own_program: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return (the sentence on a run that has nothing left to do, the notes on one that starts); a FuseError refuses."""
    from verl_fuse.host.start.compat.start import require_contracts, require_version
    from verl_fuse.host.start.resumption import nothing_left
    from verl_fuse.host.start.set_by_plugins import as_started
    from verl_fuse.host.start.settings import load_settings

    require_version()
    settings = load_settings(config, starting=True, own_program=own_program)
    require_contracts(settings.manager, as_started(config, settings))
    return nothing_left(config), settings.notes


def _is_own(task_function: Callable[..., Any] | None) -> bool:
    """Tell whether Hydra calls another function than verl's main_ppo."""
    code = getattr(task_function, "__code__", None)
    return code is not None and not Path(code.co_filename).match("verl/trainer/main_ppo.py")


def _say(*lines: str | None) -> None:
    for line in filter(None, lines):
        print(f"verl-fuse: {line}", file=sys.stderr, flush=True)
