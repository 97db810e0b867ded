"""Makes the policy of `verl-fuse simulate --policy MODULE:CLASS` decide in simulated steps: loaded and checked like a
plugin of a run, and set up beside the built-in plugin whose hooks it shares."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pluggy

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.simulate.decided import SimulatedPolicy, SimulatedRun
from verl_fuse.spec.block import nearest
from verl_fuse.spec.composed import ACTOR, CRITIC, ROLLOUT
from verl_fuse.spec.workload import Workload
from verl_fuse.testing.set_up import SetUpTrainer

OPTION, NAME, BESIDE = "--policy", "policy", "interstage"
# The hooks that a simulated rollout asks, and those of them that `interstage` answers where the policy does not.
ASKED = ("fuse_assign", "fuse_migration", "fuse_infer_next")
SHARED = ("fuse_migration", "fuse_infer_next")
NOT_ASKED = ("fuse_scale", "fuse_train_next", "fuse_transfer", "fuse_devices", "fuse_worker_class")


def simulated_policy(policy: str, workload: Workload) -> tuple[SimulatedPolicy, tuple[str, ...]]:
    """Return the policy MODULE:CLASS for steps of this workload, and notes on it; a FuseError says what is missing."""
    made = _made(policy)
    manager = _manager([], policy, made)
    implemented = {
        name
        for name in (*ASKED, *NOT_ASKED)
        if any(impl.plugin is made for impl in getattr(manager.hook, name).get_hookimpls())
    }
    if not implemented.intersection(ASKED):
        raise FuseError(
            f"{OPTION} {policy}: it has none of the hooks that a simulated rollout asks: {', '.join(ASKED)}; add one "
            "of them, marked with @hookimpl"
        )
    beside = [BESIDE] if implemented.intersection(SHARED) else []

    def make(run: SimulatedRun) -> Any:
        manager = _manager(beside, policy, made)
        named = _guarded(f"{OPTION} {policy}: fuse_config failed", lambda: plugins.config_blocks(manager))
        blocks: dict[str, Any] = {name: block() for name, block in named.items()}
        for name in beside:
            blocks[name] = replace(blocks[name], enabled=True, layout="slices", migration_threshold=run.tail)
        trainer = SetUpTrainer(
            config=_config(workload),
            blocks=blocks,
            block=blocks.get(NAME),
            replicas=run.replicas,
            devices_each=run.devices_each,
            streamed_stages=run.stages,
        )
        _guarded(f"{OPTION} {policy}: fuse_setup failed", lambda: manager.hook.fuse_setup(trainer=trainer))
        return manager.hook

    notes = (f"{', '.join(sorted(implemented.intersection(NOT_ASKED)))}: not asked by the simulator",)
    about = (f"what it leaves open is decided by fuse.{BESIDE} on slices",) if beside else ()
    return SimulatedPolicy(make), (*about, *(notes if implemented.intersection(NOT_ASKED) else ()))


def _manager(beside: list[str], policy: str, made: object) -> pluggy.PluginManager:
    """Return a manager of the policy and of these built-in plugins, which are asked after it."""
    manager = plugins.load([source.name for source in plugins.discover() if source.name not in beside])
    plugins.register(manager, made, NAME, f"{OPTION} {policy}")
    return manager


def _config(workload: Workload) -> dict[str, Any]:
    """Return the values of verl's configuration that a workload tells."""
    return {
        "data.train_batch_size": workload.prompts,
        f"{ROLLOUT}.n": workload.samples,
        f"{ROLLOUT}.prompt_length": workload.prompt.maximum,
        f"{ROLLOUT}.response_length": workload.response.maximum,
        # No engine trains, so no plugin looks for the memory of one.
        **{f"{model}.strategy": "simulated" for model in (ACTOR, CRITIC)},
    }


def _made(policy: str) -> object:
    module, _, name = policy.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise FuseError(f"{OPTION} {policy!r}: needs MODULE:CLASS, for instance acme_fuse:LongestFirst")
    # As with `python -m`: the author works in the folder of the module.
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module == missing or module.startswith(f"{missing}.")):
            raise FuseError(
                f"{OPTION} {policy}: there is no module {missing!r}; run the command in its folder, or install its "
                "package"
            ) from error
        raise _failed(f"{OPTION} {policy}: {module} cannot be imported", error) from error
    finally:
        sys.path.remove(os.getcwd())
    if not hasattr(found, name):
        known = [key for key, value in vars(found).items() if isinstance(value, type) and value.__module__ == module]
        raise FuseError(
            f"{OPTION} {policy}: {module} has no {name!r}{nearest(name, known)}; classes there: "
            f"{', '.join(known) or 'none'}"
        )
    made = getattr(found, name)
    return _guarded(f"{OPTION} {policy}: it cannot be made", made) if isinstance(made, type) else made


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except FuseError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(what, error) from error


def _failed(what: str, error: BaseException) -> FuseError:
    return FuseError(f"{what}: {type(error).__name__}: {error}")
