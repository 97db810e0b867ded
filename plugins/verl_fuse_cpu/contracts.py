"""Declares contracts: the code of verl and vLLM that the cpu platform rests on, beside its runtime patches."""

from verl_fuse.host.upstream.targets import ACTOR_YAML, CRITIC_YAML, MODEL_YAML, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, ConfigKey, Contract, Decorator, Function

PLATFORM = "verl.plugin.platform.platform_base:PlatformBase"
FSDP_IMPLEMENTATION = "verl.workers.engine.fsdp.transformer_impl"
DP_ACTOR_YAML = "verl/trainer/config/actor/dp_actor.yaml"

CONTRACTS: tuple[Contract, ...] = (
    # VERL_PLATFORM chooses the platform, which implements all abstract methods (platform.py, environment.py).
    Function(
        "verl.plugin.platform.platform_manager:PlatformRegistry.register", "class (cls, platform)", "80a12858a0ef0564"
    ),
    Function("verl.plugin.platform.platform_manager:_detect_platform_name", "()", "6f733970d6cae3e6"),
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
    Function(f"{PLATFORM}.device_name", "property (self)", "de6d1789b830b088", closed=True),
    Function(f"{PLATFORM}.vendor_name", "property (self)", "00b888fd5a268a0a", closed=True),
    Function(f"{PLATFORM}.device_module", "property (self)", "b1f0d2cde9f46238", closed=True),
    Function(f"{PLATFORM}.is_available", "(self)", "87bed23fa3d7cdba", closed=True),
    Function(f"{PLATFORM}.current_device", "(self)", "f37388ad32c1b581", closed=True),
    Function(f"{PLATFORM}.device_count", "(self)", "6ca73299ebd5acc3", closed=True),
    Function(f"{PLATFORM}.set_device", "(self, device_index)", "e0e03e3d75821ded", closed=True),
    Function(f"{PLATFORM}.synchronize", "(self, device_index=None)", "84b855a9dc098345", closed=True),
    Function(f"{PLATFORM}.manual_seed", "(self, seed)", "35c0c1aed0447a71", closed=True),
    Function(f"{PLATFORM}.manual_seed_all", "(self, seed)", "36becd2a95ecfaaf", closed=True),
    Function(f"{PLATFORM}.set_allocator_settings", "(self, settings)", "704db573adf103e0", closed=True),
    Function(f"{PLATFORM}.empty_cache", "(self)", "1702428cba37d545", closed=True),
    Function(f"{PLATFORM}.get_device_capability", "(self, device_index=0)", "dcf9863e9fe30fde", closed=True),
    Function(f"{PLATFORM}.communication_backend_name", "(self)", "33fc0a12398fcd6c", closed=True),
    Function(f"{PLATFORM}.visible_devices_envvar", "(self)", "b6f10bbbe3a3e423", closed=True),
    Function(f"{PLATFORM}.nvtx_range", "(self, msg)", "0d9dcea62a8fbc09", closed=True),
    Function(f"{PLATFORM}.profiler_start", "(self)", "61d9fb36eef180c5", closed=True),
    Function(f"{PLATFORM}.profiler_stop", "(self)", "c4d57e499325f331", closed=True),
    Function(f"{PLATFORM}.ray_resource_name", "(self)", "d8c3ee5587936915", closed=True),
    Function(f"{PLATFORM}.ray_noset_envvars", "(self)", "7079f866e05e5e09", closed=True),
    Function(f"{PLATFORM}.is_ipc_supported", "(self)", "d2e461b938d9fe14", closed=True),
    Function(f"{PLATFORM}.cudart", "(self)", "1ce4478a2d84ea35", closed=True),
    # VERL_ENGINE_DEVICE=cuda picks engines that run on any device (environment.py).
    Function(
        "verl.workers.engine.base:EngineRegistry.get_engine_cls", "class (cls, model_type, backend)", "98c5882b8685ffaf"
    ),
    Decorator(
        f"{FSDP_IMPLEMENTATION}:FSDPEngineWithLMHead",
        "EngineRegistry.register(model_type='language_model', backend=['fsdp', 'fsdp2'], device=['cuda', 'npu'])",
    ),
    Decorator(
        f"{FSDP_IMPLEMENTATION}:FSDPEngineWithValueHead",
        "EngineRegistry.register(model_type='value_model', backend=['fsdp', 'fsdp2'], device=['cuda', 'npu'])",
    ),
    # The sender names the buffers in /dev/shm (leftovers.py).
    Function(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_buffer",
        "(self)",
        "062527551832d049",
    ),
    # The roles of a run, and the keys that configure them, are read from here (refusals.py).
    Function("verl.trainer.ppo.utils:need_critic", "(config)", "182ae235222ddac9"),
    Function("verl.trainer.ppo.utils:need_reference_policy", "(config)", "f9aaac597cf7590a"),
    ConfigGroup(PPO_YAML, "model@actor_rollout_ref.model: hf_model"),
    ConfigGroup(PPO_YAML, "model@critic.model: hf_model"),
    ConfigGroup("verl/trainer/config/ref/dp_ref.yaml", "../engine@fsdp_config: fsdp"),
    Attribute("verl.workers.config:FSDPEngineConfig.mixed_precision", "None"),
    ConfigKey(PPO_YAML, "algorithm.adv_estimator", "gae"),
    ConfigKey(PPO_YAML, "algorithm.use_kl_in_reward", False),
    ConfigKey(CRITIC_YAML, "enable", None),
    ConfigKey("verl/trainer/config/ref/ref.yaml", "strategy", "${actor_rollout_ref.actor.strategy}"),
    ConfigKey(PPO_YAML, "trainer.nnodes", int),
    ConfigKey(PPO_YAML, "trainer.n_gpus_per_node", int),
    ConfigKey(PPO_YAML, "actor_rollout_ref.hybrid_engine", True),
    ConfigKey(PPO_YAML, "ray_kwargs.ray_init", dict),
    ConfigKey(ROLLOUT_YAML, "nnodes", int),
    ConfigKey(ROLLOUT_YAML, "n_gpus_per_node", object),
    Attribute("verl.workers.config:RolloutConfig.enable_sleep_mode", "True"),
    ConfigKey(ROLLOUT_YAML, "free_cache_engine", True),
    ConfigKey(ROLLOUT_YAML, "checkpoint_engine.update_weights_bucket_megabytes", int),
    ConfigKey(ROLLOUT_YAML, "checkpoint_engine.custom_backend_module", object),
    ConfigKey(ROLLOUT_YAML, "engine_kwargs.vllm", dict),
    ConfigKey(DP_ACTOR_YAML, "strategy", str),
    ConfigKey(CRITIC_YAML, "strategy", object),
    ConfigKey(ACTOR_YAML, "use_kl_loss", bool),
    ConfigKey(MODEL_YAML, "override_config", dict),
    ConfigKey(MODEL_YAML, "path", object),
    ConfigKey(MODEL_YAML, "tokenizer_path", object),
    # vLLM's CPU backend reads these (environment.py, refusals.py).
    Attribute("vllm.envs:VLLM_CPU_KVCACHE_SPACE", "0"),
    Attribute("vllm.envs:VLLM_CPU_OMP_THREADS_BIND", "'auto'"),
    Attribute("vllm.envs:VLLM_ENABLE_V1_MULTIPROCESSING", "True"),
    Attribute("vllm.config.cache:CacheConfig.kv_cache_memory_bytes"),
)
