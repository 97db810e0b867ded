"""Declares contracts: the code of verl and vLLM that the cpu platform rests on, beside its runtime patches."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, config, names

PLATFORM = "verl.plugin.platform.platform_base:PlatformBase"
METHODS = (
    "device_name vendor_name device_module is_available current_device device_count set_device synchronize manual_seed "
    "manual_seed_all set_allocator_settings empty_cache get_device_capability communication_backend_name "
    "visible_devices_envvar nvtx_range profiler_start profiler_stop ray_resource_name ray_noset_envvars "
    "is_ipc_supported cudart"
)
ENGINE = "EngineRegistry.register(model_type='{}', backend=['fsdp', 'fsdp2'], device=['cuda', 'npu'])"

CONTRACTS: tuple[Contract, ...] = (
    # VERL_PLATFORM chooses the platform, which implements all abstract methods (platform.py, environment.py).
    *names("verl.plugin.platform.platform_manager:PlatformRegistry.register :_detect_platform_name"),
    Class(PLATFORM, ("ABC",), abstract=tuple(METHODS.split())),
    *names(f"{PLATFORM}.{METHODS.replace(' ', ' .')}", closed=True),
    # VERL_ENGINE_DEVICE=cuda picks engines that run on any device (environment.py).
    *names("verl.workers.engine.base:EngineRegistry.get_engine_cls"),
    Decorator(f"{t.FSDP_ENGINES}:FSDPEngineWithLMHead", ENGINE.format("language_model")),
    Decorator(f"{t.FSDP_ENGINES}:FSDPEngineWithValueHead", ENGINE.format("value_model")),
    # The sender names the buffers in /dev/shm (leftovers.py).
    *names("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_buffer"),
    # The roles of a run, and the keys that configure them, are read from here (refusals.py).
    *names("verl.trainer.ppo.utils:need_critic :need_reference_policy"),
    *names("verl.workers.config:FSDPEngineConfig.mixed_precision= :RolloutConfig.enable_sleep_mode="),
    *config(f"{t.MODEL_YAML} tokenizer_path:any override_config:dict path:any {t.DP_REF_YAML} ../engine@fsdp_config"),
    *config(f"{t.ROLLOUT_YAML} engine_kwargs.vllm:dict nnodes:int checkpoint_engine.custom_backend_module:any"),
    *config(f"{t.ROLLOUT_YAML} checkpoint_engine.update_weights_bucket_megabytes:int n_gpus_per_node:any"),
    *config(f"{t.ROLLOUT_YAML} free_cache_engine {t.CRITIC_YAML} enable strategy:any {t.DP_ACTOR_YAML} strategy:str"),
    *config(f"{t.PPO_YAML} trainer.nnodes:int ray_kwargs.ray_init:dict algorithm.use_kl_in_reward model@critic.model"),
    *config(f"{t.PPO_YAML} trainer.n_gpus_per_node:int algorithm.adv_estimator model@actor_rollout_ref.model"),
    *config(f"{t.PPO_YAML} actor_rollout_ref.hybrid_engine {t.ACTOR_YAML} use_kl_loss:bool {t.REF_YAML} strategy"),
    # vLLM's CPU backend reads these (environment.py, refusals.py).
    *names("vllm.envs:VLLM_CPU_KVCACHE_SPACE= :VLLM_CPU_OMP_THREADS_BIND= :VLLM_ENABLE_V1_MULTIPROCESSING="),
    *names("vllm.config.cache:CacheConfig.kv_cache_memory_bytes"),
)
