"""Declares contracts on the synchronous trainer we subclass: every method we override, the flow that calls them, and
every attribute we read (trainer.py, run.py)."""

from verl_fuse.host.upstream.targets import DATA_YAML, PPO_YAML, ROLLOUT_YAML, SYNC_TRAINER, V1_PACKAGE
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, ConfigKey, Contract, Decorator, Function

# Most members are its base's; they are named through the class we subclass, so that an override put in between is
# noticed.
SERVER_MANAGER = "verl.workers.rollout.llm_server:LLMServerManager"

CONTRACTS: tuple[Contract, ...] = (
    Class(SYNC_TRAINER, ("PPOTrainer",)),
    # The flow.
    Function(f"{SYNC_TRAINER}.init", "(self)", "ef253f2d9a82ec2e"),
    Function(f"{SYNC_TRAINER}.fit", "(self, agent_loop_manager)", "cb5d3e22f19796ee", closed=True),
    Function(f"{SYNC_TRAINER}.step", "(self, metrics, timing_raw)", "04968e38c3b9bb82"),
    Function(f"{SYNC_TRAINER}._step_once", "(self, metrics, timing_raw, sample_batch_size)", "1c4476015b0086eb"),
    Function(f"{SYNC_TRAINER}._setup", "(self)", "b9f89222de4383c1", closed=True),
    Function(f"{SYNC_TRAINER}._submit_batch_to_rollout", "(self, batch)", "3ef7707849d1bb77", closed=True),
    # Prompts that a running step asks for in place of discarded prompts are submitted like its first prompts.
    Function(f"{SYNC_TRAINER}._add_prompts_to_generate", "(self, num_prompts)", "47fe9f635e877826"),
    Function(f"{SYNC_TRAINER}._get_required_batch_multiple", "(self, dp_size)", "1622664100322465"),
    # The methods we override.
    Function(f"{SYNC_TRAINER}.__init__", "(self, config)", "9453b7ce4545725b", closed=True),
    Function(f"{SYNC_TRAINER}._build_replay_buffer", "(self)", "c4f7cc1598885873", closed=True),
    Function(f"{SYNC_TRAINER}._init_resource_pool_mgr", "(self)", "54a8f7e545198961", closed=True),
    Function(f"{SYNC_TRAINER}.get_llm_client", "(self)", "a06f6318f6dce485", closed=True),
    Function(f"{SYNC_TRAINER}.prepare_step", "(self)", "c0331cb723779112", closed=True),
    Function(
        f"{SYNC_TRAINER}._balance_batch",
        "(self, batch, metrics, logging_prefix='global_seqlen', keep_minibatch=False)",
        "094b997022b0e632",
    ),
    Function(f"{SYNC_TRAINER}._compute_old_log_prob", "(self, batch, metrics)", "77bf09125cbf71fe", closed=True),
    Function(f"{SYNC_TRAINER}._compute_ref_log_prob", "(self, batch, metrics)", "637e95711c8afe1f", closed=True),
    Function(f"{SYNC_TRAINER}._compute_values", "(self, batch, metrics)", "19d36b5856a45ddc", closed=True),
    Function(f"{SYNC_TRAINER}._compute_advantage", "(self, batch, metrics)", "2b6b35afb45f17e9", closed=True),
    Function(f"{SYNC_TRAINER}._update_critic", "(self, batch, metrics)", "d29da652dea05dc7", closed=True),
    Function(f"{SYNC_TRAINER}._update_actor", "(self, batch, metrics)", "6d690df65c9199a1", closed=True),
    Function(f"{SYNC_TRAINER}._save_checkpoint", "(self)", "b85e9b361e36add6", closed=True),
    Function(
        f"{SYNC_TRAINER}._compute_metrics",
        "(self, batch, metrics, timing_raw, global_steps, epoch)",
        "1b14181cda8d6489",
    ),
    Function(f"{SYNC_TRAINER}.on_step_begin", "(self)", "c893705a108e2880", closed=True),
    Function(f"{SYNC_TRAINER}.on_sample_begin", "(self)", "ff5b33014002df1d", closed=True),
    Function(f"{SYNC_TRAINER}.on_validate_begin", "(self)", "d1c3fb00169892dd", closed=True),
    Function(f"{SYNC_TRAINER}.on_validate_end", "(self)", "979e61d40645658e", closed=True),
    Function(f"{SYNC_TRAINER}.on_init_end", "(self)", "4e7053b99ffd3fae", closed=True),
    Function(f"{SYNC_TRAINER}.on_sample_end", "(self)", "bec685556f1b30ac", closed=True),
    Function(f"{SYNC_TRAINER}.on_step_end", "(self)", "0e2b0dd6fa565e8e", closed=True),
    # The attributes we read.
    Attribute(f"{SYNC_TRAINER}.config"),
    Attribute(f"{SYNC_TRAINER}.use_reference_policy"),
    Attribute(f"{SYNC_TRAINER}.use_critic"),
    Attribute(f"{SYNC_TRAINER}.ref_in_actor"),
    Attribute(f"{SYNC_TRAINER}.global_steps"),
    Attribute(f"{SYNC_TRAINER}.total_training_steps"),
    Attribute(f"{SYNC_TRAINER}.curr_step_profile"),
    Attribute(f"{SYNC_TRAINER}.role_worker_mapping"),
    Attribute(f"{SYNC_TRAINER}.actor_rollout_wg"),
    Attribute(f"{SYNC_TRAINER}.ref_policy_wg"),
    Attribute(f"{SYNC_TRAINER}.critic_wg"),
    Attribute(f"{SYNC_TRAINER}.llm_server_manager"),
    Attribute(f"{SYNC_TRAINER}.checkpoint_manager"),
    Function(f"{SERVER_MANAGER}.get_replicas", "(self)", "6be3c7e47f9b9895"),
    Function(f"{SERVER_MANAGER}.get_client", "(self, client_cls=None, **kwargs)", "d2a2afda3a7830da"),
    Attribute("verl.workers.rollout.replica:RolloutReplica.replica_rank"),
    # The number of data-parallel ranks that a batch is cut for.
    Attribute("verl.single_controller.base.worker_group:WorkerGroup._dispatch_info", "{}"),
    Function("verl.single_controller.base.worker:Worker._query_dispatch_info", "(self, mesh_name)", "3a89f4bb92262a77"),
    Decorator(
        "verl.single_controller.base.worker:Worker._query_dispatch_info", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"
    ),
    Function(
        "verl.single_controller.base.decorator:dispatch_lazy_compute_data_proto",
        "(mesh_name, worker_group, *args, **kwargs)",
        "69557a8dd8b7f171",
    ),
    Class("verl.trainer.ppo.utils:Role", ("Enum",)),
    Attribute("verl.trainer.ppo.utils:Role.Actor"),
    Attribute("verl.trainer.ppo.utils:Role.ActorRollout"),
    Attribute("verl.trainer.ppo.utils:Role.ActorRolloutRef"),
    Attribute("verl.trainer.ppo.utils:Role.Critic"),
    Class(f"{V1_PACKAGE}.replay_buffer:ReplayBuffer"),
    # Padding rows clone row 0 and reset only the fields named here.
    Function(
        "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size",
        "(batch, batch_multiple, eos_token_id)",
        "d7433fbc131900de",
    ),
    Function(
        "verl.trainer.ppo.padding_utils:construct_minimal_padding_template",
        "(source_td, source_tag, eos_token_id)",
        "3f3e562faf39fd37",
    ),
    ConfigKey(PPO_YAML, "trainer.experiment_name", str),
    ConfigKey(PPO_YAML, "trainer.critic_warmup", 0),
    ConfigGroup(PPO_YAML, "rollout@actor_rollout_ref.rollout: rollout"),
    ConfigKey(ROLLOUT_YAML, "n", int),
    ConfigKey(ROLLOUT_YAML, "temperature", float),
    ConfigKey(ROLLOUT_YAML, "prompt_length", object),
    ConfigKey(ROLLOUT_YAML, "response_length", object),
    ConfigKey(ROLLOUT_YAML, "max_num_seqs", int),
    ConfigGroup(PPO_YAML, "data@data: legacy_data"),
    ConfigKey(DATA_YAML, "train_batch_size", int),
    ConfigKey(PPO_YAML, "skip.rollout_tq.enable", False),
    ConfigKey(PPO_YAML, "skip.rollout_tq.steps", list),
    ConfigKey(PPO_YAML, "trainer.save_freq", -1),
)
