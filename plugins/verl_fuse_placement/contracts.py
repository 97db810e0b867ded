"""Declares contracts: the code that a critic with devices of its own rests on, and the configuration that
is read, or refused (refusals.py). Asked for by runs that have one."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, config, names

POOLS = f"{t.RAY_WORKER_GROUPS}:ResourcePoolManager"

CONTRACTS: tuple[Contract, ...] = (
    # A part of a pool (host/upstream/parted_pool.py).
    Class(POOLS, required=("resource_pool_spec", "mapping")),
    *names(f"{POOLS}.create_resource_pool", closed=True),
    *names(f"{POOLS}.resource_pool_dict .resource_pool_spec .mapping {t.SYNC_TRAINER}.resource_pool_manager .logger"),
    # What the critic's loss reads, and where its metrics go (deferred.py).
    *names("verl.workers.utils.losses:value_loss verl.utils.tracking:Tracking.log transfer_queue:kv_batch_put"),
    *names("transfer_queue:kv_clear"),
    # A checkpoint's files are written anew for another number of ranks (resized.py).
    *names("verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint .save_checkpoint"),
    *names(f"{t.TRAINING_WORKER}.load_checkpoint"),
    Decorator(f"{t.TRAINING_WORKER}.load_checkpoint", t.ONE_TO_ALL),
    *config(f"{t.PPO_YAML} global_profiler.steps actor_rollout_ref.hybrid_engine:bool {t.FSDP_YAML} fsdp_size"),
    *config(f"{t.FSDP_YAML} ulysses_sequence_parallel_size"),
)
