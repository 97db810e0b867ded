"""Declares contracts on verl's checkpoint engines, which carry weights to standalone replicas: we have an engine
(weights/sync/checkpoint_engine.py), and so does the cpu plugin."""

from verl_fuse.host.upstream.targets import CHECKPOINT_ENGINES
from verl_fuse.spec.contract import Attribute, Class, Contract, Function

CHECKPOINT_ENGINE = f"{CHECKPOINT_ENGINES}:CheckpointEngine"

CONTRACTS: tuple[Contract, ...] = (
    Function(f"{CHECKPOINT_ENGINES}:CheckpointEngineRegistry.register", "(backend)", "f93273c443ac2593"),
    Class(
        CHECKPOINT_ENGINE,
        ("ABC",),
        abstract=("prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights"),
    ),
    Function(f"{CHECKPOINT_ENGINE}.prepare", "(self)", "906e1edddc3fb334", closed=True),
    Function(
        f"{CHECKPOINT_ENGINE}.build_topology",
        "class (cls, actor_wg_world_size, rollout_world_size, metadata)",
        "32c8a9b3158d1e10",
        closed=True,
    ),
    Function(f"{CHECKPOINT_ENGINE}.init_process_group", "(self, **kwargs)", "ac60867ad4da713a", closed=True),
    Function(f"{CHECKPOINT_ENGINE}.finalize", "(self)", "e985bf43a899a9a8", closed=True),
    Function(
        f"{CHECKPOINT_ENGINE}.send_weights", "async (self, weights, global_steps=None)", "21bf305c9c914116", closed=True
    ),
    Function(
        f"{CHECKPOINT_ENGINE}.receive_weights", "async (self, global_steps=None)", "975ecbeb574b8307", closed=True
    ),
    Function(
        f"{CHECKPOINT_ENGINES}:CheckpointEngineManager.build_process_group", "(self, rollout)", "6b2fa558f02b7c35"
    ),
    Function(
        f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker.__init__",
        "(self, rollout_config, model_config, server_adapter=None, *args, **kwargs)",
        "4691cf37d3d2c9a3",
    ),
    # Our engine is handed the training engine in place of its whole parameters.
    Attribute("verl.workers.engine_workers:ActorRolloutRefWorker.checkpoint_engine"),
    Function("verl.utils.device:get_torch_device", "()", "a451ff316f5944b7"),
    Function("verl.utils.device:get_device_name", "()", "f63a98cb111b11b9"),
)
