"""Declares contracts on the synchronous trainer we subclass: every method we override, the flow that calls them, and
every attribute we read (trainer.py, run.py)."""

from verl_fuse.host.upstream.targets import DATA_YAML, PPO_YAML, ROLLOUT_YAML, SYNC_TRAINER, V1_PACKAGE
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, Contract, Decorator, config_keys, names

# Most members are its base's; they are named through the class we subclass, so that an override put in between is
# noticed.
SERVER_MANAGER = "verl.workers.rollout.llm_server:LLMServerManager"

CONTRACTS: tuple[Contract, ...] = (
    Class(SYNC_TRAINER, ("PPOTrainer",)),
    # The flow.
    *names(SYNC_TRAINER, "init step _step_once"),
    *names(SYNC_TRAINER, "fit _setup _submit_batch_to_rollout", closed=True),
    # Prompts that a running step asks for in place of discarded prompts are submitted like its first prompts.
    *names(SYNC_TRAINER, "_add_prompts_to_generate _get_required_batch_multiple"),
    # The methods we override.
    *names(
        SYNC_TRAINER,
        "__init__ _build_replay_buffer _init_resource_pool_mgr get_llm_client prepare_step _compute_old_log_prob "
        "_compute_ref_log_prob _compute_values _compute_advantage _update_critic _update_actor _save_checkpoint "
        "on_step_begin on_sample_begin on_validate_begin on_validate_end on_init_end on_sample_end on_step_end",
        closed=True,
    ),
    *names(SYNC_TRAINER, "_balance_batch _compute_metrics"),
    # The attributes we read.
    *names(
        SYNC_TRAINER,
        "config use_reference_policy use_critic ref_in_actor global_steps total_training_steps curr_step_profile "
        "role_worker_mapping actor_rollout_wg ref_policy_wg critic_wg llm_server_manager checkpoint_manager",
    ),
    *names(SERVER_MANAGER, "get_replicas get_client"),
    *names("verl.workers.rollout.replica:RolloutReplica", "replica_rank"),
    # The number of data-parallel ranks that a batch is cut for.
    Attribute("verl.single_controller.base.worker_group:WorkerGroup._dispatch_info", "{}"),
    *names("verl.single_controller.base.worker:Worker", "_query_dispatch_info"),
    Decorator(
        "verl.single_controller.base.worker:Worker._query_dispatch_info", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"
    ),
    *names("verl.single_controller.base.decorator", "dispatch_lazy_compute_data_proto"),
    Class("verl.trainer.ppo.utils:Role", ("Enum",)),
    *names("verl.trainer.ppo.utils:Role", "Actor ActorRollout ActorRolloutRef Critic"),
    *names(f"{V1_PACKAGE}.replay_buffer", "ReplayBuffer"),
    # Padding rows clone row 0 and reset only the fields named here.
    *names("verl.trainer.ppo.padding_utils", "upsample_batch_to_divisible_size construct_minimal_padding_template"),
    *config_keys(
        PPO_YAML,
        "trainer.experiment_name:str trainer.critic_warmup skip.rollout_tq.enable skip.rollout_tq.steps:list "
        "trainer.save_freq",
    ),
    ConfigGroup(PPO_YAML, "rollout@actor_rollout_ref.rollout: rollout"),
    *config_keys(ROLLOUT_YAML, "n:int temperature:float prompt_length:any response_length:any max_num_seqs:int"),
    ConfigGroup(PPO_YAML, "data@data: legacy_data"),
    *config_keys(DATA_YAML, "train_batch_size:int"),
)
