"""The switch that needs no configuration: with `VERL_FUSE=off` in the driver's environment, mode `fuse` trains by
verl's own synchronous trainer, the block `fuse` is not read, and nothing else of this package is loaded.

Every process that imports verl loads this module, so it imports nothing that costs time.

Invariants (tests/unit/host/test_switch.py, tests/integration/test_off_is_stock.py):
- a value other than `on` and `off` is refused, by the driver before Ray starts and by a worker that would train;
- processes of a Ray cluster that was started without the variable get it from the driver.
"""

import os
from types import ModuleType
from typing import Any

from verl_fuse.errors import FuseError

VARIABLE = "VERL_FUSE"
NOTE = f"{VARIABLE}=off: verl's own trainer trains, and the block fuse is not read"
# Ray calls the function of this name in the driver for the environment of all workers (ray/_private/worker.py).
_HOOK = "RAY_RUNTIME_ENV_HOOK"


def switched_off() -> bool:
    """Tell whether this process's environment switches verl-fuse off; a FuseError if the value says neither."""
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise FuseError(f"{VARIABLE}={value!r} in the environment: needs on or off; unset, it is on")
    return value == "off"


def require_on(why: str) -> None:
    """Refuse, for the reason `why`, a command that needs verl-fuse on."""
    if switched_off():
        raise FuseError(f"{VARIABLE}=off in the environment: {why}; unset it, or set it to on")


def reach_workers(address: str | None) -> str | None:
    """Have Ray set the variable in the workers of the run that this driver starts on the cluster at `address` (None:
    what Ray finds); return a sentence where Ray does not ask the hook."""
    own = f"{__name__}.with_variable"
    hook = os.environ.setdefault(_HOOK, own)
    if hook != own:
        why = f"{_HOOK}={hook} is set"
    elif "UV" in os.environ:
        why = f"Ray does not read {_HOOK} under uv run"
    elif (address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://"):
        why = f"Ray's client does not read {_HOOK}"
    else:
        return None
    return (
        f"{VARIABLE}=off is not handed to workers, because {why}: on a Ray cluster that was started without the "
        f"variable add +ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}=off"
    )


def with_variable(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return the runtime environment of Ray's workers with this process's value of the variable."""
    env = runtime_env or {}
    return {**env, "env_vars": {**(env.get("env_vars") or {}), VARIABLE: os.environ[VARIABLE]}}


def stock_trainer(v1: ModuleType) -> type:
    """Return the class to register for mode `fuse` where the switch is off: calling it makes verl's synchronous trainer
    itself.

    The configuration, which verl's task runner hands on to the agent loops, becomes that of mode `sync`: verl's modules
    compare the name of the mode.
    """
    from omegaconf import open_dict

    class StockTrainer(v1.PPOTrainerSync):
        def __new__(cls, config: Any) -> Any:
            with open_dict(config):
                config.trainer.v1.trainer_mode = "sync"
                if "fuse" in config:
                    del config["fuse"]
            print(f"verl-fuse: {NOTE}", flush=True)
            return v1.PPOTrainerSync(config)

    return StockTrainer
