"""Names definitions and configuration files of verl that several modules of contracts need. The module is light: it
holds text only."""

V1_PACKAGE = "verl.trainer.ppo.v1"
SYNC_TRAINER = f"{V1_PACKAGE}.trainer_sync:PPOTrainerSync"
ENGINE_WORKERS = "verl.workers.engine_workers"
RAY_WORKER_GROUPS = "verl.single_controller.ray.base"
FSDP_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
LOAD_BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"
ROLLOUT_REPLICA = "verl.workers.rollout.replica:RolloutReplica"
CHECKPOINT_ENGINES = "verl.checkpoint_engine.base"
CHECKPOINT_MANAGER = f"{CHECKPOINT_ENGINES}:CheckpointEngineManager"

PPO_YAML = "verl/trainer/config/ppo_trainer.yaml"
ACTOR_YAML = "verl/trainer/config/actor/actor.yaml"
ROLLOUT_YAML = "verl/trainer/config/rollout/rollout.yaml"
MODEL_YAML = "verl/trainer/config/model/hf_model.yaml"
FSDP_YAML = "verl/trainer/config/engine/fsdp.yaml"
MEGATRON_YAML = "verl/trainer/config/engine/megatron.yaml"
