"""Declares contracts on the code that limits a stage's batch, and on the metrics that we compute like verl
(stages.py)."""

from verl_fuse.host.upstream.targets import ACTOR_YAML, ENGINE_WORKERS, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import ConfigGroup, Contract, config_keys, names

REF_YAML = "verl/trainer/config/ref/ref.yaml"

CONTRACTS: tuple[Contract, ...] = (
    *names("verl.protocol", "DataProto"),
    *names("verl.protocol:DataProto", "batch"),
    *names("verl.trainer.ppo.core_algos", "agg_loss"),
    *names("verl.utils.config", "omega_conf_to_dataclass()"),
    *names("verl.utils.debug.metrics", "calculate_debug_metrics"),
    # Keys that decide the size of a micro-batch.
    *names(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", "init_model", closed=True),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "__init__"),
    *names("verl.workers.engine.utils", "prepare_micro_batches"),
    *names("verl.workers.config:EngineConfig", "use_dynamic_bsz infer_micro_batch_size_per_gpu"),
    *names("verl.workers.config:CriticConfig", "engine"),
    ConfigGroup(PPO_YAML, "actor@actor_rollout_ref.actor: ${model_engine}_actor"),
    ConfigGroup(PPO_YAML, "ref@actor_rollout_ref.ref: ${model_engine}_ref"),
    ConfigGroup(PPO_YAML, "critic@critic: ${model_engine}_critic"),
    ConfigGroup(PPO_YAML, "algorithm@algorithm.rollout_correction: rollout_correction"),
    *config_keys("verl/trainer/config/algorithm/rollout_correction.yaml", "bypass_mode"),
    *config_keys(
        ROLLOUT_YAML, "log_prob_use_dynamic_bsz:any log_prob_micro_batch_size_per_gpu:any calculate_log_probs:bool"
    ),
    *config_keys(REF_YAML, "log_prob_use_dynamic_bsz:any log_prob_micro_batch_size_per_gpu:any"),
    # Tells whether leaving weights for slices takes memory of a device (assembly.py).
    ConfigGroup("verl/trainer/config/actor/dp_actor.yaml", "../engine@fsdp_config: fsdp"),
    ConfigGroup("verl/trainer/config/critic/dp_critic.yaml", "../engine@fsdp: fsdp"),
    *config_keys("verl/trainer/config/critic/dp_critic.yaml", "strategy:str"),
    *config_keys("verl/trainer/config/engine/fsdp.yaml", "param_offload:bool"),
    *config_keys(ACTOR_YAML, "loss_agg_mode:str loss_scale_factor:any"),
)
