"""The code that a critic with devices of its own rests on: verl's pools and their parts, its critic's
turn, where metrics go, and the checkpoint that a run goes on from.

Asked for by runs that have one; every fingerprint was taken, and the code behind it read, at verl 0.9.1
and TransferQueue 0.1.11.
"""

from verl_fuse.host.upstream.targets import FSDP_YAML, PPO_YAML, RAY_WORKER_GROUPS, SYNC_TRAINER
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Function

CONTRACTS: tuple[Contract, ...] = (
    # A part of a pool (host/update/parted_pool.py).
    Class(f"{RAY_WORKER_GROUPS}:ResourcePoolManager", required=("resource_pool_spec", "mapping")),
    Function(
        f"{RAY_WORKER_GROUPS}:ResourcePoolManager.create_resource_pool", "(self)", "30c413ac1db221a1", closed=True
    ),
    Attribute(f"{RAY_WORKER_GROUPS}:ResourcePoolManager.resource_pool_dict"),
    Attribute(f"{RAY_WORKER_GROUPS}:ResourcePoolManager.resource_pool_spec"),
    Attribute(f"{RAY_WORKER_GROUPS}:ResourcePoolManager.mapping"),
    Attribute(f"{SYNC_TRAINER}.resource_pool_manager"),
    # What the critic's loss reads, and where its metrics go (host/update/deferred.py).
    Function("verl.workers.utils.losses:value_loss", "(config, model_output, data, dp_group=None)", "424fe5b8b2b2879f"),
    Function(
        "transfer_queue:kv_batch_put",
        "(keys, partition_id, fields=None, tags=None, data_parser=None)",
        "981d79d33baa34ad",
    ),
    Function("transfer_queue:kv_clear", "(keys, partition_id)", "74d489042464d128"),
    Attribute(f"{SYNC_TRAINER}.logger"),
    Function("verl.utils.tracking:Tracking.log", "(self, data, step, backend=None)", "a5042da80e6afa1e"),
    # The files of the checkpoint that a run goes on from, which are written anew for another number of ranks
    # (host/weights/layouts/resized.py).
    Function(
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
        "(self, local_path, hdfs_path=None, del_local_after_load=False)",
        "40fafa56b85d31e4",
    ),
    Function(
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
        "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
        "32ad03c3c13201ae",
    ),
    # Configuration that is read, or refused (refusals.py).
    ConfigKey(PPO_YAML, "global_profiler.steps", None),
    ConfigKey(PPO_YAML, "actor_rollout_ref.hybrid_engine", bool),
    ConfigKey(FSDP_YAML, "fsdp_size", -1),
    ConfigKey(FSDP_YAML, "ulysses_sequence_parallel_size", 1),
)
