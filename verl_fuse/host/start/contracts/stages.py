"""Declares contracts on the code that limits a stage's batch, and on the metrics that we compute like verl
(stages.py)."""

from verl_fuse.host.upstream.targets import ACTOR_YAML, ENGINE_WORKERS, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, ConfigKey, Contract, Function

REF_YAML = "verl/trainer/config/ref/ref.yaml"

CONTRACTS: tuple[Contract, ...] = (
    Class("verl.protocol:DataProto"),
    Attribute("verl.protocol:DataProto.batch"),
    Function(
        "verl.trainer.ppo.core_algos:agg_loss",
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)",
        "2fea5684032c5564",
    ),
    Function("verl.utils.config:omega_conf_to_dataclass", "(config, dataclass_type=None)"),
    Function("verl.utils.debug.metrics:calculate_debug_metrics", "(data)", "e428c5bc913a74ee"),
    # Keys that decide the size of a micro-batch.
    Function(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.init_model", "(self)", "08285ce005c99bc5", closed=True),
    Function(f"{ENGINE_WORKERS}:TrainingWorker.__init__", "(self, config)", "9c7d51b661503829"),
    Function(
        "verl.workers.engine.utils:prepare_micro_batches",
        "(data, dp_group=None, num_batches_divided_by=None, same_micro_num_in_dp=True, min_num_micro_batch=None, "
        "use_dynamic_bsz_balance=True)",
        "436e7986ed87d126",
    ),
    Attribute("verl.workers.config:EngineConfig.use_dynamic_bsz"),
    Attribute("verl.workers.config:EngineConfig.infer_micro_batch_size_per_gpu"),
    Attribute("verl.workers.config:CriticConfig.engine"),
    ConfigGroup(PPO_YAML, "actor@actor_rollout_ref.actor: ${model_engine}_actor"),
    ConfigGroup(PPO_YAML, "ref@actor_rollout_ref.ref: ${model_engine}_ref"),
    ConfigGroup(PPO_YAML, "critic@critic: ${model_engine}_critic"),
    ConfigGroup(PPO_YAML, "algorithm@algorithm.rollout_correction: rollout_correction"),
    ConfigKey("verl/trainer/config/algorithm/rollout_correction.yaml", "bypass_mode", False),
    ConfigKey(ROLLOUT_YAML, "log_prob_use_dynamic_bsz", object),
    ConfigKey(ROLLOUT_YAML, "log_prob_micro_batch_size_per_gpu", object),
    ConfigKey(REF_YAML, "log_prob_use_dynamic_bsz", object),
    ConfigKey(REF_YAML, "log_prob_micro_batch_size_per_gpu", object),
    ConfigKey(ROLLOUT_YAML, "calculate_log_probs", bool),
    # Tells whether leaving weights for slices takes memory of a device (assembly.py).
    ConfigGroup("verl/trainer/config/actor/dp_actor.yaml", "../engine@fsdp_config: fsdp"),
    ConfigGroup("verl/trainer/config/critic/dp_critic.yaml", "../engine@fsdp: fsdp"),
    ConfigKey("verl/trainer/config/critic/dp_critic.yaml", "strategy", str),
    ConfigKey("verl/trainer/config/engine/fsdp.yaml", "param_offload", bool),
    ConfigKey(ACTOR_YAML, "loss_agg_mode", str),
    ConfigKey(ACTOR_YAML, "loss_scale_factor", object),
)
