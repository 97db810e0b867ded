"""The code that a critic with devices of its own rests on: verl's pools and their parts, its critic's
turn, where metrics go, and the checkpoint that a run goes on from.

Asked for by runs that have one; every fingerprint was taken, and the code behind it read, at verl 0.9.1
and TransferQueue 0.1.11.
"""

from verl_fuse.host.upstream.targets import FSDP_YAML, PPO_YAML, RAY_WORKER_GROUPS, SYNC_TRAINER
from verl_fuse.spec.contract import Class, Contract, config_keys, names

CONTRACTS: tuple[Contract, ...] = (
    # A part of a pool (host/update/parted_pool.py).
    Class(f"{RAY_WORKER_GROUPS}:ResourcePoolManager", required=("resource_pool_spec", "mapping")),
    *names(f"{RAY_WORKER_GROUPS}:ResourcePoolManager", "create_resource_pool", closed=True),
    *names(f"{RAY_WORKER_GROUPS}:ResourcePoolManager", "resource_pool_dict resource_pool_spec mapping"),
    *names(SYNC_TRAINER, "resource_pool_manager"),
    # What the critic's loss reads, and where its metrics go (host/update/deferred.py).
    *names("verl.workers.utils.losses", "value_loss"),
    *names("transfer_queue", "kv_batch_put kv_clear"),
    *names(SYNC_TRAINER, "logger"),
    *names("verl.utils.tracking:Tracking", "log"),
    # The files of the checkpoint that a run goes on from, which are written anew for another number of ranks
    # (host/weights/layouts/resized.py).
    *names("verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager", "load_checkpoint save_checkpoint"),
    # Configuration that is read, or refused (refusals.py).
    *config_keys(PPO_YAML, "global_profiler.steps actor_rollout_ref.hybrid_engine:bool"),
    *config_keys(FSDP_YAML, "fsdp_size ulysses_sequence_parallel_size"),
)
