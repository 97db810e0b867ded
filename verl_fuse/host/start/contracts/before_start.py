"""Declares contracts on what verl does with its configuration, its data and its checkpoint minutes after the start,
which is checked before (value_types.py, mini_batches.py, data_rows.py, resumption.py, upstream/checkpoints.py)."""

from verl_fuse.host.upstream.targets import DATA_YAML, FSDP_ENGINE, PPO_YAML, SYNC_TRAINER
from verl_fuse.spec.contract import Contract, config_keys, names

CHECKPOINTS = "verl.utils.checkpoint.checkpoint_manager"
DATASET = "verl.utils.dataset.rl_dataset"

CONTRACTS: tuple[Contract, ...] = (
    # Batches and steps of an epoch, by the rows of the data. `fit` and `_load_checkpoint` are declared elsewhere.
    *names(SYNC_TRAINER, "_init_dataloader"),
    *names(f"{DATASET}:RLHFDataset", "_read_files_and_tokenize"),
    *names(DATASET, "get_dataset_class"),
    # The checkpoint that a run goes on from.
    *names(CHECKPOINTS, "find_latest_ckpt_path get_checkpoint_tracker_filename"),
    # The ranks that divide a mini-batch.
    *names(FSDP_ENGINE, "get_data_parallel_size"),
    *names("verl.workers.engine.megatron.transformer_impl:MegatronEngine", "get_data_parallel_size"),
    *names("verl.workers.config:FSDPActorConfig", "__post_init__"),
    *names("verl.workers.config:FSDPCriticConfig", "__post_init__"),
    *names("verl.workers.config:ActorConfig", "ppo_mini_batch_size"),
    *names("verl.workers.config:CriticConfig", "ppo_mini_batch_size"),
    # Keys of the blocks without a dataclass.
    *config_keys(
        DATA_YAML,
        "train_files:str train_max_samples custom_cls.path gen_batch_size val_batch_size seed "
        "dataloader_num_workers:int",
    ),
    *config_keys(
        PPO_YAML,
        "trainer.total_training_steps trainer.total_epochs:int trainer.test_freq trainer.val_only "
        "trainer.val_before_train trainer.resume_from_path trainer.logger:list",
    ),
)
