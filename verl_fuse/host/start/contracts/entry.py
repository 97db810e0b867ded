"""Declares contracts on the places where verl finds us, and on what verl does with configuration, data and checkpoint
minutes after the start, which is checked before (value_types.py, mini_batches.py, data_rows.py, resumption.py,
launch_values.py, registered.py)."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Contract, Decorator, Registration, Uses, config, names

MAIN = "verl.trainer.main_ppo"
BASE = f"{t.V1_PACKAGE}.trainer_base"

CONTRACTS: tuple[Contract, ...] = (
    # verl loads plugins at every import of verl; a failing plugin is hidden.
    *names(f"verl:_discovered= :_plugins_policy= {t.V1_PACKAGE}:register_trainer :get_trainer_cls"),
    Registration("verl", "_ep.load()"),
    Decorator(f"{t.V1_PACKAGE}.trainer_sync:PPOTrainerSync", "register_trainer('sync')"),
    Decorator(f"{MAIN}:main", "hydra.main(config_path='config', config_name='ppo_trainer', version_base=None)"),
    # All code that reads trainer_mode.
    *names(f"verl.trainer.main_ppo:main :run_ppo :TaskRunnerV1.run {BASE}:TRAINER_REGISTRY= :PPOTrainer.trainer_mode"),
    *config(f"{t.PPO_YAML} trainer.use_v1 trainer.v1.trainer_mode trainer.device:str trainer.default_local_dir:str"),
    Uses(
        "verl",
        "trainer_mode",
        comparisons=(
            f"{BASE}:PPOTrainer._build_replay_buffer: self.trainer_mode == 'sync'",
            f"{BASE}:PPOTrainer._init_dataloader: self.trainer_mode != 'sync'",
            f"{BASE}:PPOTrainer._load_checkpoint: self.trainer_mode != 'sync'",
            f"{BASE}:PPOTrainer._reissue_inflight_prompts: self.trainer_mode == 'sync'",
            f"{BASE}:PPOTrainer._save_checkpoint: self.trainer_mode != 'sync'",
            f"{BASE}:PPOTrainer._submit_batch_to_rollout: self.trainer_mode != 'sync'",
        ),
        others=(
            f"{MAIN}:TaskRunnerV1.run: config.trainer.v1.trainer_mode",
            f"{t.V1_PACKAGE}.replay_buffer:ReplayBuffer.__init__: trainer_mode",
            f"{BASE}:PPOTrainer.__init__: self.config.trainer.v1.trainer_mode",
            f"{BASE}:PPOTrainer.__init__: self.trainer_mode",
            *(2 * (f"{BASE}:PPOTrainer._build_replay_buffer: self.trainer_mode",)),
            "verl.utils.skip.rollout_skip:RolloutTqSkip.__init__: global_config.trainer.v1.trainer_mode",
        ),
    ),
    # The names that verl looks up when workers are up, and after the first rollout.
    *names("verl.workers.rollout.replica:RolloutReplicaRegistry.register :RolloutReplicaRegistry.get"),
    *names("verl.workers.rollout.replica:get_rollout_replica_class"),
    *names("verl.trainer.ppo.core_algos:register_adv_est :get_adv_estimator_fn :kl_penalty_forward"),
    *names("verl.workers.config:RolloutConfig.__post_init__"),
    # Batches and steps of an epoch, by the rows of the data; the checkpoint that a run goes on from; the ranks that
    # divide a mini-batch; the device, by which presets leave out what was measured to be slower on accelerators.
    *names(f"{t.SYNC_TRAINER}._init_dataloader verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize"),
    *names("verl.utils.dataset.rl_dataset:get_dataset_class"),
    *names("verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path :get_checkpoint_tracker_filename"),
    *names(f"{t.FSDP_ENGINE}.get_data_parallel_size {t.MEGATRON_ENGINES}:MegatronEngine.get_data_parallel_size"),
    *names("verl.workers.config:FSDPActorConfig.__post_init__ :FSDPCriticConfig.__post_init__"),
    *names("verl.workers.config:ActorConfig.ppo_mini_batch_size :CriticConfig.ppo_mini_batch_size"),
    *config(f"{t.DATA_YAML} train_files:str train_max_samples custom_cls.path gen_batch_size val_batch_size seed"),
    *config(f"{t.DATA_YAML} dataloader_num_workers:int {t.PPO_YAML} trainer.total_training_steps"),
    *config(f"{t.PPO_YAML} trainer.resume_from_path trainer.total_epochs:int trainer.test_freq trainer.val_only"),
    *config(f"{t.PPO_YAML} trainer.val_before_train trainer.logger:list"),
)
