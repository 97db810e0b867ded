"""Declares contracts on the code that migration rests on: cut the routing, abort, sleep, resume (rollout/replicas.py,
rollout/resume.py)."""

from verl_fuse.host.upstream.targets import CHECKPOINT_MANAGER, LOAD_BALANCER, ROLLOUT_REPLICA
from verl_fuse.spec.contract import Attribute, Class, Contract, Function

ASYNC_SERVER_CLIENT = "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient"
VLLM_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
VLLM_REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica"

CONTRACTS: tuple[Contract, ...] = (
    Function(f"{LOAD_BALANCER}.acquire_server", "(self, request_id)", "0c2a9da73ca038d8", closed=True),
    Function(f"{LOAD_BALANCER}.release_server", "(self, server_id, request_id=None)", "8a2241c1a58308e6"),
    Function(f"{LOAD_BALANCER}.add_servers", "(self, servers)", "51f15391891e945d"),
    Function(f"{LOAD_BALANCER}.remove_servers", "(self, server_ids)", "aec3a2b82bfb8f9d"),
    Function(f"{LOAD_BALANCER}.get_status", "(self)", "7c9a097b3cc028c1"),
    Attribute("verl.workers.rollout.llm_server:LLMServerManager.global_load_balancer"),
    # Our client puts answers together like this client, with the limits that it takes over from the server.
    Function(
        f"{VLLM_SERVER}.generate",
        "async (self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None, audio_data=None, "
        "mm_processor_kwargs=None, priority=0, kv_transfer_params=None)",
        "769ba287ef0753e1",
    ),
    Attribute(f"{VLLM_SERVER}.global_steps"),
    Attribute(f"{VLLM_SERVER}._admitting"),
    Attribute(f"{VLLM_SERVER}._resume_event"),
    Attribute(f"{VLLM_SERVER}._pd_decode_peers"),
    Function(f"{VLLM_SERVER}.set_global_steps", "async (self, global_steps)", "82dd3e47744f2907"),
    Attribute("vllm.v1.engine.async_llm:AsyncLLM.vllm_config"),
    Attribute("vllm.config.cache:CacheConfig.num_gpu_blocks"),
    Attribute("vllm.config.cache:CacheConfig.block_size"),
    # Tells what a replica holds and whether it still generates, and ends a replica that does not (upstream/vllm.py).
    Attribute("vllm.v1.engine.async_llm:AsyncLLM.output_processor"),
    Attribute("vllm.v1.engine.output_processor:OutputProcessor.request_states"),
    Attribute("vllm.v1.engine.output_processor:RequestState.detokenizer"),
    Function("vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens", "(self)"),
    Attribute("vllm.v1.engine.async_llm:AsyncLLM.engine_core"),
    Attribute("vllm.v1.engine.core_client:MPClient.resources"),
    Attribute("vllm.v1.engine.core_client:BackgroundResources.engine_manager"),
    Attribute("vllm.v1.engine.utils:CoreEngineProcManager.processes"),
    Attribute(f"{ROLLOUT_REPLICA}.server_handle"),
    Attribute(f"{ROLLOUT_REPLICA}.max_concurrency"),
    Class(ASYNC_SERVER_CLIENT, ("LLMServerClient",)),
    Function(
        f"{ASYNC_SERVER_CLIENT}.generate",
        "async (self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
        "mm_processor_kwargs=None, **kwargs)",
        "9fb9618a83cbe10c",
    ),
    Function(f"{ASYNC_SERVER_CLIENT}._acquire_server", "async (self, request_id, **extra)", "b4993bb27fcdce48"),
    Function(f"{ASYNC_SERVER_CLIENT}._release_server", "(self, server_id, request_id=None)"),
    Function(
        f"{VLLM_SERVER}.abort_all_requests",
        "async (self, reset_prefix_cache=True, reject_request=False)",
        "684cdf37641182d2",
    ),
    Function(f"{VLLM_SERVER}.sleep", "async (self)", "17a8e6acab33953a"),
    Function(f"{VLLM_SERVER}.wake_up", "async (self, tags=None)", "90aa96028d485250"),
    Function(f"{VLLM_SERVER}.resume_generation", "async (self)", "c87adbf32daf10e1"),
    Function(f"{VLLM_SERVER}._park_until_admitted", "async (self, request_id)", "90314ddc2eede45b"),
    Class(VLLM_REPLICA, ("RolloutReplica",)),
    Attribute(f"{VLLM_REPLICA}.server_class"),
    Function(f"{VLLM_REPLICA}.abort_all_requests", "async (self, reject_request=False)", "84e31eaaea8112cc"),
    Function(f"{VLLM_REPLICA}.sleep", "async (self)", "fd9830ee11649163"),
    Function(f"{VLLM_REPLICA}.resume_generation", "async (self)", "79af0b186dad6a73"),
    Function(f"{ROLLOUT_REPLICA}.init_hybrid", "async (self, worker_group)"),
    Function(f"{ROLLOUT_REPLICA}.init_colocated", "async (self, resource_pool)"),
    Function(f"{ROLLOUT_REPLICA}.init_standalone", "async (self)"),
    Function(f"{CHECKPOINT_MANAGER}.resume_generation_replicas", "async (self)", "8eab5392c5d9b3d2"),
    Function(f"{CHECKPOINT_MANAGER}.remove_replicas", "(self, replicas)", "7d7de849db9a553d"),
    Function(f"{CHECKPOINT_MANAGER}.abort_replicas", "async (self, reject_request=False)", "c34dab8a3d5a3ae7"),
)
