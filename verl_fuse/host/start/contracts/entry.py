"""Declares contracts on the places where verl finds us: its plugin entry points, its trainer registry, its composed
configuration (entry.py, preflight.py, inspect.py)."""

from verl_fuse.host.upstream.targets import PPO_YAML, V1_PACKAGE
from verl_fuse.spec.contract import Attribute, ConfigKey, Contract, Decorator, Function, Registration, Uses

MAIN = "verl.trainer.main_ppo"

CONTRACTS: tuple[Contract, ...] = (
    # verl loads it at every import of verl; a failing plugin is hidden.
    Attribute("verl:_discovered", "_entry_points(group='verl.plugins')"),
    Attribute("verl:_plugins_policy", "os.getenv('VERL_USE_EXTERNAL_PLUGINS', 'auto').strip().lower()"),
    Registration("verl", "_ep.load()"),
    Attribute(f"{V1_PACKAGE}.trainer_base:TRAINER_REGISTRY", "{}"),
    Function(f"{V1_PACKAGE}:register_trainer", "(name)", "516632b621d04c0a"),
    Function(f"{V1_PACKAGE}:get_trainer_cls", "(name)", "6f81eca83782c63b"),
    Decorator(f"{V1_PACKAGE}.trainer_sync:PPOTrainerSync", "register_trainer('sync')"),
    Attribute(f"{V1_PACKAGE}.trainer_base:PPOTrainer.trainer_mode"),
    Decorator(f"{MAIN}:main", "hydra.main(config_path='config', config_name='ppo_trainer', version_base=None)"),
    # All code that reads trainer_mode.
    Function(f"{MAIN}:main", "(config)", "ab7c0c50958eba71"),
    Function(f"{MAIN}:run_ppo", "(config, task_runner_class)", "f411fc7ece41f550"),
    ConfigKey(PPO_YAML, "trainer.use_v1", True),
    Function(f"{MAIN}:TaskRunnerV1.run", "(self, config)", "d606dbfc6d028515"),
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
    ConfigKey(PPO_YAML, "trainer.v1.trainer_mode", "sync"),
    # Presets leave out what was measured to be slower on accelerators.
    ConfigKey(PPO_YAML, "trainer.device", str),
    ConfigKey(PPO_YAML, "trainer.default_local_dir", str),
)
