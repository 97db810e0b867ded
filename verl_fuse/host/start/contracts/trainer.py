"""Declares contracts on the synchronous trainer we subclass (trainer.py, run.py), and on the workers we subclass, whose
dispatch by Ray decides the calls that a lane may make (worker.py, lane.py).

Most members of the trainer are its base's; they are named through the class we subclass, so that an override put in
between is noticed.
"""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, config, names

OF_MESH = "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='{}'){})"

CONTRACTS: tuple[Contract, ...] = (
    Class(t.SYNC_TRAINER, ("PPOTrainer",)),
    # The flow. Prompts that a running step asks for in place of discarded prompts are submitted like its first prompts.
    *names(f"{t.SYNC_TRAINER}.init .step ._step_once ._add_prompts_to_generate ._get_required_batch_multiple"),
    # The methods we override.
    *names(f"{t.SYNC_TRAINER}.__init__ .fit ._setup ._build_replay_buffer .get_llm_client .prepare_step", closed=True),
    *names(f"{t.SYNC_TRAINER}._init_resource_pool_mgr ._submit_batch_to_rollout ._save_checkpoint", closed=True),
    *names(f"{t.SYNC_TRAINER}._compute_old_log_prob ._compute_ref_log_prob ._compute_values", closed=True),
    *names(f"{t.SYNC_TRAINER}._compute_advantage ._update_critic ._update_actor .on_init_end", closed=True),
    *names(f"{t.SYNC_TRAINER}.on_step_begin .on_sample_begin .on_validate_begin .on_validate_end", closed=True),
    *names(f"{t.SYNC_TRAINER}.on_sample_end .on_step_end", closed=True),
    *names(f"{t.SYNC_TRAINER}._balance_batch ._compute_metrics"),
    # The attributes we read; the ranks that a batch is cut for; padding clones row 0, and resets the fields it names.
    *names(f"{t.SYNC_TRAINER}.config .use_reference_policy .use_critic .ref_in_actor .global_steps .critic_wg"),
    *names(f"{t.SYNC_TRAINER}.total_training_steps .curr_step_profile .role_worker_mapping .actor_rollout_wg"),
    *names(f"{t.SYNC_TRAINER}.ref_policy_wg .llm_server_manager .checkpoint_manager {t.REPLAY_BUFFER}"),
    *names("verl.trainer.ppo.utils:Role.Actor .ActorRollout .ActorRolloutRef .Critic"),
    *names(
        f"verl.workers.rollout.llm_server:LLMServerManager.get_replicas .get_client {t.ROLLOUT_REPLICA}.replica_rank"
    ),
    *names("verl.single_controller.base.worker_group:WorkerGroup._dispatch_info="),
    *names("verl.single_controller.base.decorator:dispatch_lazy_compute_data_proto"),
    *names("verl.single_controller.base.worker:Worker._query_dispatch_info"),
    *names("verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size :construct_minimal_padding_template"),
    Decorator("verl.single_controller.base.worker:Worker._query_dispatch_info", t.ONE_TO_ALL),
    Class("verl.trainer.ppo.utils:Role", ("Enum",)),
    *config(f"{t.PPO_YAML} rollout@actor_rollout_ref.rollout data@data trainer.experiment_name:str"),
    *config(f"{t.PPO_YAML} trainer.critic_warmup trainer.save_freq skip.rollout_tq.enable skip.rollout_tq.steps:list"),
    *config(f"{t.ROLLOUT_YAML} n:int max_num_seqs:int temperature:float prompt_length:any response_length:any"),
    *config(f"{t.DATA_YAML} train_batch_size:int"),
    # The worker classes we subclass, and the methods we wrap; our wrappers keep the attributes that `register` sets on
    # them. The path of an update through a mini-batch, parts of which a fused update and verl_fuse_update/lean change.
    Class(t.WORKER, ("Worker",)),
    Class(t.TRAINING_WORKER, ("Worker",)),
    *names(f"{t.WORKER}.compute_log_prob .compute_ref_log_prob .update_actor .update_weights", closed=True),
    *names(f"{t.WORKER}.save_checkpoint {t.TRAINING_WORKER}.infer_batch .train_mini_batch", closed=True),
    *names(f"{t.TRAINING_WORKER}.save_checkpoint .train_batch", closed=True),
    Decorator(f"{t.WORKER}.compute_log_prob", OF_MESH.format("actor", "")),
    Decorator(f"{t.WORKER}.compute_ref_log_prob", OF_MESH.format("ref", "")),
    Decorator(f"{t.WORKER}.update_actor", OF_MESH.format("actor", "")),
    Decorator(f"{t.WORKER}.update_weights", "register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)"),
    Decorator(f"{t.WORKER}.save_checkpoint", t.ONE_TO_ALL),
    Decorator(f"{t.TRAINING_WORKER}.infer_batch", OF_MESH.format("train", ", blocking=False")),
    Decorator(f"{t.TRAINING_WORKER}.train_mini_batch", OF_MESH.format("train", ", blocking=False")),
    Decorator(f"{t.TRAINING_WORKER}.save_checkpoint", t.ONE_TO_ALL),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngineWithLMHead.forward_step .postprocess_micro_batch_func"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngineWithValueHead.forward_step :MegatronEngine.forward_backward_batch"),
    *names("verl.single_controller.base.decorator:register :make_nd_compute_dataproto_dispatch_fn"),
    *names("verl.single_controller.base.worker:Worker.rank() verl.workers.engine.base:BaseEngine.train_batch"),
    *names("verl.utils.transferqueue_utils:tqbridge verl.utils.tensordict_utils:get_non_tensor_data"),
)
