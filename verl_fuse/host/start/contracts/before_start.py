"""Declares contracts on what verl does with its configuration, its data and its checkpoint minutes after the start,
which is checked before (value_types.py, mini_batches.py, data_rows.py, resumption.py, upstream/checkpoints.py)."""

from verl_fuse.host.upstream.targets import DATA_YAML, FSDP_ENGINE, PPO_YAML, SYNC_TRAINER
from verl_fuse.spec.contract import Attribute, ConfigKey, Contract, Function

CHECKPOINTS = "verl.utils.checkpoint.checkpoint_manager"
DATASET = "verl.utils.dataset.rl_dataset"

CONTRACTS: tuple[Contract, ...] = (
    # Batches and steps of an epoch, by the rows of the data. `fit` and `_load_checkpoint` are declared elsewhere.
    Function(f"{SYNC_TRAINER}._init_dataloader", "(self)", "0a2466d0b05511f6"),
    Function(f"{DATASET}:RLHFDataset._read_files_and_tokenize", "(self)", "f304f242de8edeb2"),
    Function(f"{DATASET}:get_dataset_class", "(data_config)", "986c0338c9774fcb"),
    # The checkpoint that a run goes on from.
    Function(f"{CHECKPOINTS}:find_latest_ckpt_path", "(path, directory_format='global_step_{}')", "9bd2cd8428dbc391"),
    Function(f"{CHECKPOINTS}:get_checkpoint_tracker_filename", "(root_path)", "109db4f41b668612"),
    # The ranks that divide a mini-batch.
    Function(f"{FSDP_ENGINE}.get_data_parallel_size", "(self)", "14e6fd54d5a87273"),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.get_data_parallel_size",
        "(self)",
        "a1d23c7359e0fb81",
    ),
    Function("verl.workers.config:FSDPActorConfig.__post_init__", "(self)", "1d7a7582cf92f6a2"),
    Function("verl.workers.config:FSDPCriticConfig.__post_init__", "(self)", "01263e40dabcdb83"),
    Attribute("verl.workers.config:ActorConfig.ppo_mini_batch_size"),
    Attribute("verl.workers.config:CriticConfig.ppo_mini_batch_size"),
    # Keys of the blocks without a dataclass.
    ConfigKey(DATA_YAML, "train_files", str),
    ConfigKey(DATA_YAML, "train_max_samples", -1),
    ConfigKey(DATA_YAML, "custom_cls.path", None),
    ConfigKey(DATA_YAML, "gen_batch_size", None),
    ConfigKey(DATA_YAML, "val_batch_size", None),
    ConfigKey(DATA_YAML, "seed", None),
    ConfigKey(DATA_YAML, "dataloader_num_workers", int),
    ConfigKey(PPO_YAML, "trainer.total_training_steps", None),
    ConfigKey(PPO_YAML, "trainer.total_epochs", int),
    ConfigKey(PPO_YAML, "trainer.test_freq", -1),
    ConfigKey(PPO_YAML, "trainer.val_only", False),
    ConfigKey(PPO_YAML, "trainer.val_before_train", True),
    ConfigKey(PPO_YAML, "trainer.resume_from_path", None),
    ConfigKey(PPO_YAML, "trainer.logger", list),
)
