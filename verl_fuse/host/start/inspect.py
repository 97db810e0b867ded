"""Collects facts of verl, Hydra and Ray for `verl-fuse doctor`, without judgement.

verl and Ray are imported by the functions that need them, so that an installation without them can still be examined.
"""

import importlib
import json
import logging
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import verl_fuse
from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.versions import installed

VERL_PLUGIN_GROUP = "verl.plugins"
DISTRIBUTION = "verl-fuse"
RAY_TIMEOUT = 180.0


@dataclass(frozen=True)
class Probe:
    """One process as verl would find it. `entry_points` maps each of our entry points to the fault that keeps it from
    working, or None."""

    python: str
    verl: str | None
    version: str
    location: str
    entry_points: dict[str, str | None]
    trainer: str | None


def probe() -> Probe:
    """Examine this process: import verl's V1 trainers, look for our trainer, then load our entry points, since verl
    hides their errors."""
    trainers = importlib.import_module("verl.trainer.ppo.v1").trainer_base.TRAINER_REGISTRY
    trainer = trainers.get("fuse")
    broken: dict[str, str | None] = {}
    for entry in entry_points(group=VERL_PLUGIN_GROUP):
        if entry.dist is None or entry.dist.name != DISTRIBUTION:
            continue
        try:
            entry.load()
            failure = getattr(sys.modules[entry.module], "failure", None)
        except Exception as error:  # noqa: BLE001  The user needs to read every error.
            failure = error
        broken[entry.name] = None if failure is None else f"{type(failure).__name__}: {failure}"
    return Probe(
        python=platform.python_version(),
        verl=installed("verl"),
        version=verl_fuse.__version__,
        location=str(Path(verl_fuse.__file__).parent),
        entry_points=broken,
        trainer=None if trainer is None else f"{trainer.__module__}.{trainer.__qualname__}",
    )


def probe_driver() -> Probe:
    """Examine a fresh process of this environment; a FuseError carries its last words if it fails."""
    code = (
        "import dataclasses, json; from verl_fuse.host.start.inspect import probe; "
        "print(json.dumps(dataclasses.asdict(probe())))"
    )
    process = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise FuseError(f"importing verl's trainers failed: {last}")
    return Probe(**json.loads(process.stdout.splitlines()[-1]))


def probe_ray_worker() -> Probe:
    """Examine a worker of the cluster that RAY_ADDRESS names, or of a Ray started for this with one CPU; errors of Ray
    pass through."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "local")
    local = {"num_cpus": 1, "include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        return ray.get(ray.remote(probe).remote(), timeout=RAY_TIMEOUT)
    finally:
        ray.shutdown()


def composed_fuse_keys() -> list[str]:
    """Compose verl's own trainer configuration with `+fuse=default` and return the keys of the block; errors of Hydra
    pass through."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+fuse=default", "trainer.v1.trainer_mode=fuse"])
    return sorted(str(key) for key in config.fuse)


def accelerators() -> int:
    """Return the number of CUDA devices that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
