"""Entry point in verl's plugin group: every process that imports verl loads this module, so the module only plants one
post-import hook.

verl logs a failing plugin at DEBUG and goes on (verl/__init__.py:73), so no failure here may stay quiet: the trainer is
registered when verl's V1 trainer package has been imported, and an error there reaches the importing process.
"""

import sys
from types import ModuleType

from verl_fuse.errors import FuseError
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.switch import stock_trainer, switched_off
from verl_fuse.host.upstream.on_import import on_import
from verl_fuse.host.upstream.targets import V1_PACKAGE


def register() -> None:
    """Arrange for trainer mode `fuse` to be registered once verl's V1 trainers are imported."""
    on_import(V1_PACKAGE, _register_trainer)


def _register_trainer(v1: ModuleType) -> None:
    try:
        if switched_off():
            v1.register_trainer(TRAINER_MODE)(stock_trainer(v1))
            return
    except FuseError as error:
        _unavailable(str(error))
        return
    from verl_fuse.host.upstream.versions import installed, problem

    fault = problem("verl", installed("verl"))
    if fault is not None:
        _unavailable(fault)
        return
    try:
        from verl_fuse.host.trainer import FuseTrainer
    except ImportError as error:
        _unavailable(f"{error} (verl-fuse doctor says what else is not as expected)")
        return

    taken = v1.trainer_base.TRAINER_REGISTRY.get(TRAINER_MODE)
    if taken is not None:
        raise FuseError(
            f"trainer mode {TRAINER_MODE!r} is already registered by {taken.__module__}.{taken.__qualname__}: "
            "uninstall the package that provides it, or verl-fuse"
        )
    v1.register_trainer(TRAINER_MODE)(FuseTrainer)


def _unavailable(why: str) -> None:
    """Print why mode fuse does not exist with this verl: stock modes must go on working beside a verl that does not
    fit; preflight and doctor tell the reason too."""
    print(f"verl-fuse: trainer mode {TRAINER_MODE!r} is not available: {why}", file=sys.stderr)


# verl loads the entry point object and does not call it.
register()
