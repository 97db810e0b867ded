"""Declares contracts: the code of verl and vLLM that the cpu platform rests on, beside its runtime patches."""

from verl_fuse.host.upstream.targets import ACTOR_YAML, CRITIC_YAML, MODEL_YAML, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, Contract, Decorator, config_keys, names

PLATFORM = "verl.plugin.platform.platform_base:PlatformBase"
FSDP_IMPLEMENTATION = "verl.workers.engine.fsdp.transformer_impl"
DP_ACTOR_YAML = "verl/trainer/config/actor/dp_actor.yaml"

CONTRACTS: tuple[Contract, ...] = (
    # VERL_PLATFORM chooses the platform, which implements all abstract methods (platform.py, environment.py).
    *names("verl.plugin.platform.platform_manager:PlatformRegistry", "register"),
    *names("verl.plugin.platform.platform_manager", "_detect_platform_name"),
    Class(
        PLATFORM,
        ("ABC",),
        abstract=(
            "device_name",
            "vendor_name",
            "device_module",
            "is_available",
            "current_device",
            "device_count",
            "set_device",
            "synchronize",
            "manual_seed",
            "manual_seed_all",
            "set_allocator_settings",
            "empty_cache",
            "get_device_capability",
            "communication_backend_name",
            "visible_devices_envvar",
            "nvtx_range",
            "profiler_start",
            "profiler_stop",
            "ray_resource_name",
            "ray_noset_envvars",
            "is_ipc_supported",
            "cudart",
        ),
    ),
    *names(
        PLATFORM,
        "device_name vendor_name device_module is_available current_device device_count set_device synchronize "
        "manual_seed manual_seed_all set_allocator_settings empty_cache get_device_capability "
        "communication_backend_name visible_devices_envvar nvtx_range profiler_start profiler_stop "
        "ray_resource_name ray_noset_envvars is_ipc_supported cudart",
        closed=True,
    ),
    # VERL_ENGINE_DEVICE=cuda picks engines that run on any device (environment.py).
    *names("verl.workers.engine.base:EngineRegistry", "get_engine_cls"),
    Decorator(
        f"{FSDP_IMPLEMENTATION}:FSDPEngineWithLMHead",
        "EngineRegistry.register(model_type='language_model', backend=['fsdp', 'fsdp2'], device=['cuda', 'npu'])",
    ),
    Decorator(
        f"{FSDP_IMPLEMENTATION}:FSDPEngineWithValueHead",
        "EngineRegistry.register(model_type='value_model', backend=['fsdp', 'fsdp2'], device=['cuda', 'npu'])",
    ),
    # The sender names the buffers in /dev/shm (leftovers.py).
    *names("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender", "_init_buffer"),
    # The roles of a run, and the keys that configure them, are read from here (refusals.py).
    *names("verl.trainer.ppo.utils", "need_critic need_reference_policy"),
    ConfigGroup(PPO_YAML, "model@actor_rollout_ref.model: hf_model"),
    ConfigGroup(PPO_YAML, "model@critic.model: hf_model"),
    ConfigGroup("verl/trainer/config/ref/dp_ref.yaml", "../engine@fsdp_config: fsdp"),
    Attribute("verl.workers.config:FSDPEngineConfig.mixed_precision", "None"),
    *config_keys(
        PPO_YAML,
        "algorithm.adv_estimator algorithm.use_kl_in_reward trainer.nnodes:int trainer.n_gpus_per_node:int "
        "actor_rollout_ref.hybrid_engine ray_kwargs.ray_init:dict",
    ),
    *config_keys(CRITIC_YAML, "enable strategy:any"),
    *config_keys("verl/trainer/config/ref/ref.yaml", "strategy"),
    *config_keys(
        ROLLOUT_YAML,
        "nnodes:int n_gpus_per_node:any free_cache_engine checkpoint_engine.update_weights_bucket_megabytes:int "
        "checkpoint_engine.custom_backend_module:any engine_kwargs.vllm:dict",
    ),
    Attribute("verl.workers.config:RolloutConfig.enable_sleep_mode", "True"),
    *config_keys(DP_ACTOR_YAML, "strategy:str"),
    *config_keys(ACTOR_YAML, "use_kl_loss:bool"),
    *config_keys(MODEL_YAML, "override_config:dict path:any tokenizer_path:any"),
    # vLLM's CPU backend reads these (environment.py, refusals.py).
    Attribute("vllm.envs:VLLM_CPU_KVCACHE_SPACE", "0"),
    Attribute("vllm.envs:VLLM_CPU_OMP_THREADS_BIND", "'auto'"),
    Attribute("vllm.envs:VLLM_ENABLE_V1_MULTIPROCESSING", "True"),
    *names("vllm.config.cache:CacheConfig", "kv_cache_memory_bytes"),
)
