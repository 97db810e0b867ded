"""Declares contracts on generation: clients and their answers (client.py, resume.py), the routing of prompts
(routing.py, prompts.py, processes.py), migration (replicas.py), the replay buffer (watch.py), TransferQueue, and the
keys, tags and fields that verl's agent loop writes there (rows.py, completeness.py, samples.py, accounting.py)."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Registration, config, names

TOKEN_OUTPUT = f"{t.ROLLOUT_REPLICAS}:TokenOutput"

CONTRACTS: tuple[Contract, ...] = (
    # The client we subclass, and the answers that it puts together.
    *names(f"{t.SERVER_CLIENT} .__init__ ._acquire_server .generate .config ._load_balancer"),
    *names("verl.utils:normalize_token_ids()"),
    *names(f"{TOKEN_OUTPUT}.token_ids .log_probs .routed_experts .stop_reason .num_preempted .extra_fields"),
    Class(TOKEN_OUTPUT, ("BaseModel",), required=("token_ids",)),
    Registration(t.ROLLOUT_REPLICAS, 'RolloutReplicaRegistry.register("vllm", _load_vllm)'),
    Registration(t.ROLLOUT_REPLICAS, 'RolloutReplicaRegistry.register("sglang", _load_sglang)'),
    # Our client puts answers together like this client, with the limits that it takes over from the server.
    Class(t.ASYNC_CLIENT, ("LLMServerClient",)),
    *names(f"{t.ASYNC_CLIENT}.generate ._acquire_server ._release_server() {t.VLLM_SERVER}.generate .set_global_steps"),
    *names(f"{t.VLLM_SERVER}.global_steps ._admitting ._resume_event ._pd_decode_peers"),
    *names("vllm.v1.engine.async_llm:AsyncLLM.vllm_config vllm.config.cache:CacheConfig.num_gpu_blocks .block_size"),
    # The load balancer we subclass, and its callers.
    *names(f"verl.workers.rollout.llm_server:LLMServerManager.global_load_balancer {t.LOAD_BALANCER}.release_server"),
    *names(f"{t.LOAD_BALANCER} .add_servers .remove_servers .get_status ._servers ._inflight_requests"),
    *names(f"{t.LOAD_BALANCER}.__init__ .acquire_server .require_acquire_fields", closed=True),
    # Migration: cut the routing, abort, sleep, resume.
    *names(f"{t.VLLM_SERVER}.abort_all_requests .sleep .wake_up .resume_generation ._park_until_admitted"),
    *names(f"{t.VLLM_REPLICA}.server_class .abort_all_requests .sleep .resume_generation"),
    *names(f"{t.ROLLOUT_REPLICA}.init_hybrid() .init_colocated() .server_handle? .max_concurrency? .server_address?"),
    *names(f"{t.CHECKPOINT_MANAGER}.resume_generation_replicas .remove_replicas .abort_replicas"),
    Class(t.VLLM_REPLICA, ("RolloutReplica",)),
    # Tells what a replica holds and whether it still generates, and ends a replica that does not (upstream/vllm.py).
    *names("vllm.v1.engine.async_llm:AsyncLLM.output_processor .engine_core"),
    *names("vllm.v1.engine.output_processor:OutputProcessor.request_states :RequestState.detokenizer"),
    *names("vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens()"),
    *names("vllm.v1.engine.core_client:MPClient.resources :BackgroundResources.engine_manager"),
    *names("vllm.v1.engine.utils:CoreEngineProcManager.processes"),
    # One task per prompt (`_run_prompt`), in which the tasks of its samples are made; what deals prompts out to the
    # workers; where an agent loop is built, through the module's name `hydra` (agents.py), and samples are scored; the
    # step, and whether it validates; the place of a checkpoint, for files kept beside it; the log of errors of agent
    # loops (agent_errors.py); the keys {uid}_{session}_{index}, the tags, and the states of prompt groups.
    *names("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop :get_trajectory_info"),
    *names(f"{t.AGENT_LOOP}:AgentLoopWorkerTQ._run_prompt ._agent_loop_postprocess .generate_sequences :logger="),
    *names(f"{t.AGENT_LOOP}:AgentLoopManagerTQ.generate_sequences {t.SYNC_TRAINER}.get_reward_handles"),
    *names(f"{t.SYNC_TRAINER}._load_checkpoint verl.experimental.agent_loop:AgentLoopManager.agent_loop_workers"),
    *config(f"{t.PPO_YAML} trainer.resume_mode"),
    # The replay buffer. Its poll interval of 2 s (spec/step.py) is the slowest pace we take. `_clear_groups` discards
    # groups of a running step, and asks for other groups: dynamic sampling, failed groups. What dynamic sampling found
    # of a group (discards.py) is the value that its samples share, or None. A user's sampler must be a ReplayBuffer.
    *names(f"{t.REPLAY_BUFFER}.__init__ ._sync_metadata_from_transfer_queue .sample .poll_interval .partitions"),
    *names(f"{t.REPLAY_BUFFER}.pending_keys .running_keys .finished_keys .failure_keys ._dapo_filtered_keys"),
    *names(f"{t.REPLAY_BUFFER}._dapo_classification_cache .filter_groups_metric .train_batch_size"),
    *names(f"{t.REPLAY_BUFFER}._wait_for_next_poll ._clear_groups", closed=True),
    *config(f"{t.PPO_YAML} trainer.v1.sampler.custom_sampler.name:any trainer.v1.sampler.custom_sampler.path:any"),
    # TransferQueue. `kv_batch_get` returns the fields that all rows have.
    *names("transfer_queue:kv_batch_get :kv_list :KVBatchMeta.keys .tags .partition_id .extra_info .__post_init__"),
    *names("transfer_queue:KVBatchMeta.__len__"),
    Class("transfer_queue:KVBatchMeta", required=()),
)
