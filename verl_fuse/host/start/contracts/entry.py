"""Declares contracts on the places where verl finds us: its plugin entry points, its trainer registry, its composed
configuration (entry.py, preflight.py, inspect.py)."""

from verl_fuse.host.upstream.targets import PPO_YAML, V1_PACKAGE
from verl_fuse.spec.contract import Attribute, Contract, Decorator, Registration, Uses, config_keys, names

MAIN = "verl.trainer.main_ppo"

CONTRACTS: tuple[Contract, ...] = (
    # verl loads it at every import of verl; a failing plugin is hidden.
    Attribute("verl:_discovered", "_entry_points(group='verl.plugins')"),
    Attribute("verl:_plugins_policy", "os.getenv('VERL_USE_EXTERNAL_PLUGINS', 'auto').strip().lower()"),
    Registration("verl", "_ep.load()"),
    Attribute(f"{V1_PACKAGE}.trainer_base:TRAINER_REGISTRY", "{}"),
    *names(V1_PACKAGE, "register_trainer get_trainer_cls"),
    Decorator(f"{V1_PACKAGE}.trainer_sync:PPOTrainerSync", "register_trainer('sync')"),
    *names(f"{V1_PACKAGE}.trainer_base:PPOTrainer", "trainer_mode"),
    Decorator(f"{MAIN}:main", "hydra.main(config_path='config', config_name='ppo_trainer', version_base=None)"),
    # All code that reads trainer_mode.
    *names(MAIN, "main run_ppo"),
    *config_keys(PPO_YAML, "trainer.use_v1 trainer.v1.trainer_mode"),
    *names(f"{MAIN}:TaskRunnerV1", "run"),
    Uses(
        "verl",
        "trainer_mode",
        comparisons=(
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer: self.trainer_mode == 'sync'",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_dataloader: self.trainer_mode != 'sync'",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint: self.trainer_mode != 'sync'",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._reissue_inflight_prompts: self.trainer_mode == 'sync'",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint: self.trainer_mode != 'sync'",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._submit_batch_to_rollout: self.trainer_mode != 'sync'",
        ),
        others=(
            "verl.trainer.main_ppo:TaskRunnerV1.run: config.trainer.v1.trainer_mode",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__: trainer_mode",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__: self.config.trainer.v1.trainer_mode",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__: self.trainer_mode",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer: self.trainer_mode",
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer: self.trainer_mode",
            "verl.utils.skip.rollout_skip:RolloutTqSkip.__init__: global_config.trainer.v1.trainer_mode",
        ),
    ),
    # Presets leave out what was measured to be slower on accelerators.
    *config_keys(PPO_YAML, "trainer.device:str trainer.default_local_dir:str"),
)
