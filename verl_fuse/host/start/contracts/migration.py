"""Declares contracts on the code that migration rests on: cut the routing, abort, sleep, resume (rollout/replicas.py,
rollout/resume.py)."""

from verl_fuse.host.upstream.targets import CHECKPOINT_MANAGER, LOAD_BALANCER, ROLLOUT_REPLICA
from verl_fuse.spec.contract import Attribute, Class, Contract, names

ASYNC_SERVER_CLIENT = "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient"
VLLM_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
VLLM_REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica"

CONTRACTS: tuple[Contract, ...] = (
    *names(LOAD_BALANCER, "acquire_server", closed=True),
    *names(LOAD_BALANCER, "release_server add_servers remove_servers get_status"),
    *names("verl.workers.rollout.llm_server:LLMServerManager", "global_load_balancer"),
    # Our client puts answers together like this client, with the limits that it takes over from the server.
    *names(VLLM_SERVER, "generate global_steps _admitting _resume_event _pd_decode_peers set_global_steps"),
    *names("vllm.v1.engine.async_llm:AsyncLLM", "vllm_config"),
    *names("vllm.config.cache:CacheConfig", "num_gpu_blocks block_size"),
    # Tells what a replica holds and whether it still generates, and ends a replica that does not (upstream/vllm.py).
    *names("vllm.v1.engine.async_llm:AsyncLLM", "output_processor engine_core"),
    *names("vllm.v1.engine.output_processor:OutputProcessor", "request_states"),
    *names("vllm.v1.engine.output_processor:RequestState", "detokenizer"),
    *names("vllm.v1.engine.detokenizer:IncrementalDetokenizer", "num_output_tokens()"),
    *names("vllm.v1.engine.core_client:MPClient", "resources"),
    *names("vllm.v1.engine.core_client:BackgroundResources", "engine_manager"),
    *names("vllm.v1.engine.utils:CoreEngineProcManager", "processes"),
    Attribute(f"{ROLLOUT_REPLICA}.server_handle"),
    Attribute(f"{ROLLOUT_REPLICA}.max_concurrency"),
    Class(ASYNC_SERVER_CLIENT, ("LLMServerClient",)),
    *names(ASYNC_SERVER_CLIENT, "generate _acquire_server _release_server()"),
    *names(VLLM_SERVER, "abort_all_requests sleep wake_up resume_generation _park_until_admitted"),
    Class(VLLM_REPLICA, ("RolloutReplica",)),
    *names(VLLM_REPLICA, "server_class abort_all_requests sleep resume_generation"),
    *names(ROLLOUT_REPLICA, "init_hybrid() init_colocated() init_standalone()"),
    *names(CHECKPOINT_MANAGER, "resume_generation_replicas remove_replicas abort_replicas"),
)
