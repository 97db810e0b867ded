"""Declares contracts on verl's checkpoint engines, which carry weights to standalone replicas: we have an engine
(weights/sync/checkpoint_engine.py), and so does the cpu plugin."""

from verl_fuse.host.upstream.targets import CHECKPOINT_ENGINES
from verl_fuse.spec.contract import Class, Contract, names

CHECKPOINT_ENGINE = f"{CHECKPOINT_ENGINES}:CheckpointEngine"

CONTRACTS: tuple[Contract, ...] = (
    *names(f"{CHECKPOINT_ENGINES}:CheckpointEngineRegistry", "register"),
    Class(
        CHECKPOINT_ENGINE,
        ("ABC",),
        abstract=("prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights"),
    ),
    *names(
        CHECKPOINT_ENGINE,
        "prepare build_topology init_process_group finalize send_weights receive_weights",
        closed=True,
    ),
    *names(f"{CHECKPOINT_ENGINES}:CheckpointEngineManager", "build_process_group"),
    *names(f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker", "__init__"),
    # Our engine is handed the training engine in place of its whole parameters.
    *names("verl.workers.engine_workers:ActorRolloutRefWorker", "checkpoint_engine"),
    *names("verl.utils.device", "get_torch_device get_device_name"),
)
