"""The table of verl 0.9.1's exact settings: every key that may be tried, with the reason why it changes no mathematics.

Invariants (tests/contracts/test_exact_settings.py): every key is in verl's composed configuration of the engines that
it serves, with the default named here, or, where it is `added`, verl's code has that default; the code named as its
reader reads it.
"""

from dataclasses import replace

from verl_fuse.spec.composed import ACTOR, CRITIC, FSDP_BLOCKS, MODEL, REFERENCE, ROLLOUT, ULYSSES
from verl_fuse.tune import rules
from verl_fuse.tune.setting import Reader, Role, Rule, Setting, Value, Wants

_BOTH = (True, False)
_FSDP, _ALL = ("fsdp", "fsdp2"), ("fsdp", "fsdp2", "megatron")
_GPU: frozenset[Wants] = frozenset({"accelerator"})
_EXPERTS: frozenset[Wants] = frozenset({"experts"})
_NAMES: dict[str, Role] = {ACTOR: "actor", REFERENCE: "reference", CRITIC: "critic"}

# Where verl reads them.
_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker.init_model"
_TRAINING = "verl.workers.engine_workers:TrainingWorker.__init__"
_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup"
_FSDP_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_OUTPUTS = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
_TRANSFORMER = "megatron.core.transformer"
_SERVERS = {
    "vllm": "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    "sglang": "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer",
    "trtllm": "verl.workers.rollout.trtllm_rollout.trtllm_async_server:TRTLLMHttpServer",
}
_SENDERS = {
    "vllm": "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights",
    "sglang": "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter.update_weights",
    "trtllm": "verl.workers.rollout.trtllm_rollout.trtllm_rollout:ServerAdapter.update_weights",
}


def _served(name: str, default: Value, values: tuple[Value, ...] | Rule, reason: str, *, names: str = "") -> Setting:
    """A key that each rollout engine named reads where it starts, and that changes how requests are batched."""
    engines = tuple(names.split() or _SERVERS)
    readers = tuple(Reader(f"{_SERVERS[engine]}.launch_server", f"config.{name}") for engine in engines)
    return Setting(f"{ROLLOUT}.{name}", "rollout", engines, default, values, reason, readers, rounds=True)


_SAMPLED = "samples keep their distribution: "
_ROLLOUT: tuple[Setting, ...] = (
    _served(
        "tensor_model_parallel_size", 2, rules.REPLICA, _SAMPLED + "devices of a replica share each layer's products"
    ),
    replace(
        _served("data_parallel_size", 1, rules.REPLICA, _SAMPLED + "attention is computed request by request"),
        wants=_EXPERTS,
        engines=("vllm", "sglang"),
        readers=tuple(
            Reader(f"{_SERVERS[engine]}.launch_server", "config.data_parallel_size") for engine in ("vllm", "sglang")
        ),
    ),
    replace(
        _served("expert_parallel_size", 1, rules.REPLICA_EXPERTS, _SAMPLED + "experts are divided, not changed"),
        wants=_EXPERTS,
    ),
    replace(
        _served("gpu_memory_utilization", 0.5, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), _SAMPLED + "a larger KV cache"),
        wants=_GPU,
    ),
    _served("max_num_seqs", 256, rules.REQUESTS, _SAMPLED + "requests that run at once"),
    _served(
        "max_num_batched_tokens",
        8192,
        rules.PASS_TOKENS,
        _SAMPLED + "tokens that a pass may compute",
        names="vllm trtllm",
    ),
    _served("enable_chunked_prefill", True, _BOTH, _SAMPLED + "prompts are computed in parts", names="vllm trtllm"),
    _served(
        "enable_prefix_caching",
        True,
        _BOTH,
        _SAMPLED + "a prefix has the same keys and values; verl clears the cache with new weights",
        names="vllm trtllm",
    ),
    replace(
        _served("enforce_eager", False, _BOTH, _SAMPLED + "the same operations, captured or not", names="vllm sglang"),
        wants=_GPU,
    ),
    replace(
        _served(
            "cudagraph_capture_sizes", None, rules.CAPTURED, _SAMPLED + "sizes of captured graphs", names="vllm trtllm"
        ),
        needs={f"{ROLLOUT}.enforce_eager": (False,)},
        wants=_GPU,
    ),
    Setting(
        f"{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode",
        "rollout",
        ("vllm",),
        "FULL_AND_PIECEWISE",
        ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE"),
        _SAMPLED + "which passes are captured as graphs",
        (Reader(f"{_SERVERS['vllm']}.launch_server", "compilation_config.cudagraph_mode"),),
        rounds=True,
        needs={f"{ROLLOUT}.enforce_eager": (False,)},
        wants=_GPU,
        added=True,
    ),
    Setting(
        f"{ROLLOUT}.free_cache_engine",
        "rollout",
        tuple(_SERVERS),
        True,
        _BOTH,
        "memory is freed while the trainer works, or kept; new weights clear the cache either way",
        tuple(Reader(f"{server}.sleep", "config.free_cache_engine") for server in _SERVERS.values()),
        wants=_GPU,
    ),
    Setting(
        f"{ROLLOUT}.layered_summon",
        "rollout",
        ("vllm", "sglang"),
        False,
        _BOTH,
        "adapters are gathered layer by layer, not at once",
        (
            Reader(_WORKER, "rollout.layered_summon"),
            Reader("verl.utils.fsdp_utils:collect_lora_params", "layered_summon"),
        ),
        needs={
            f"{ACTOR}.strategy": _FSDP,
            f"{MODEL}.lora.merge": (False,),
            # verl refuses it where the rollout has no base weights yet.
            f"{ROLLOUT}.load_format": ("auto", "safetensors"),
        },
        wants=frozenset({"adapters"}),
    ),
    Setting(
        f"{ROLLOUT}.agent.num_workers",
        "rollout",
        tuple(_SERVERS),
        8,
        rules.powers(1, 64),
        "processes that run agent loops; each sample has its own loop",
        (
            Reader(
                "verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers", "agent.num_workers"
            ),
        ),
    ),
    Setting(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "rollout",
        tuple(_SERVERS),
        2048,
        rules.powers(256, 8192),
        "weights are copied in buckets of this size",
        tuple(Reader(sender, "checkpoint_engine.update_weights_bucket_megabytes") for sender in _SENDERS.values()),
    ),
    Setting(
        "reward.num_workers",
        "reward",
        tuple(_SERVERS),
        8,
        rules.powers(1, 64),
        "processes that score samples, each sample alone",
        (
            Reader(
                "verl.experimental.reward_loop.reward_loop:RewardLoopManager._init_reward_loop_workers",
                "reward.num_workers",
            ),
        ),
        # The old key, where it is set, replaces this one.
        needs={"reward_model.num_workers": (None,)},
    ),
)

_SUMMED = "losses are normalised by the tokens or samples of the whole mini-batch, so that micro-batches only add up"
_ROW = "a row's log-probs do not depend on the rows computed beside it"


def _cut(key: str, role: Role, reads: str, default: Value, reason: str, packed: str) -> Setting:
    """A key of micro-batches: by tokens where the key `packed` is true, by rows where it is false."""
    by_tokens = "token_len" in key
    return Setting(
        key,
        role,
        _ALL,
        default,
        rules.BUDGET if by_tokens else rules.MICRO_BATCH,
        reason,
        (Reader(_WORKER, reads),),
        rounds=True,
        needs={packed: (by_tokens,)},
    )


_TOKENS, _ROWS, _PACKS = "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_dynamic_bsz"
_PASSES: tuple[Setting, ...] = (
    Setting(
        f"{ACTOR}.{_PACKS}",
        "actor",
        _ALL,
        False,
        rules.PACKING,
        _SUMMED,
        (Reader(_WORKER, f"actor.{_PACKS}"),),
        rounds=True,
        # verl asserts that both are equal.
        together=(f"{ROLLOUT}.log_prob_{_PACKS}",),
    ),
    _cut(f"{ACTOR}.ppo_{_TOKENS}", "actor", f"actor.ppo_{_TOKENS}", 16384, _SUMMED, f"{ACTOR}.{_PACKS}"),
    _cut(f"{ACTOR}.ppo_{_ROWS}", "actor", f"actor.ppo_{_ROWS}", None, _SUMMED, f"{ACTOR}.{_PACKS}"),
    _cut(f"{ROLLOUT}.log_prob_{_TOKENS}", "actor", f"rollout.log_prob_{_TOKENS}", 16384, _ROW, f"{ACTOR}.{_PACKS}"),
    _cut(f"{ROLLOUT}.log_prob_{_ROWS}", "actor", f"rollout.log_prob_{_ROWS}", None, _ROW, f"{ACTOR}.{_PACKS}"),
    Setting(
        f"{REFERENCE}.log_prob_{_PACKS}",
        "reference",
        _ALL,
        False,
        rules.PACKING,
        _ROW,
        (Reader(_WORKER, f"ref.{_PACKS}"),),
        rounds=True,
    ),
    _cut(
        f"{REFERENCE}.log_prob_{_TOKENS}",
        "reference",
        f"ref.ppo_{_TOKENS}",
        16384,
        _ROW,
        f"{REFERENCE}.log_prob_{_PACKS}",
    ),
    _cut(
        f"{REFERENCE}.log_prob_{_ROWS}", "reference", f"ref.ppo_{_ROWS}", None, _ROW, f"{REFERENCE}.log_prob_{_PACKS}"
    ),
    Setting(
        f"{CRITIC}.ppo_infer_{_TOKENS}",
        "critic",
        _ALL,
        32768,
        rules.BUDGET,
        "values and update are always packed; " + _SUMMED,
        (Reader(_TRAINER, f"critic_cfg.ppo_infer_{_TOKENS}"),),
        rounds=True,
        added=True,
    ),
)


def _model(role: str, block: str) -> tuple[Setting, ...]:
    name = _NAMES[role]

    def read(method: str, key: str) -> tuple[Reader, ...]:
        return (Reader(f"{_FSDP_ENGINE}.{method}", f"model_config.{key}"),)

    return (
        Setting(
            f"{block}.use_remove_padding",
            name,
            _ALL,
            True,
            rules.PADDING,
            "padding has no loss, and no token attends to it",
            (Reader(_TRAINING, "model_config.use_remove_padding"),),
            rounds=True,
        ),
        Setting(
            f"{block}.enable_gradient_checkpointing",
            name,
            _FSDP,
            True,
            _BOTH,
            "activations are computed again, or kept",
            read("_build_module", "enable_gradient_checkpointing"),
        ),
        Setting(
            f"{block}.enable_activation_offload",
            name,
            _FSDP,
            False,
            _BOTH,
            "activations wait on the host",
            read("_build_fsdp_module", "enable_activation_offload"),
            wants=_GPU,
        ),
        Setting(
            f"{block}.use_liger",
            name,
            _FSDP,
            False,
            _BOTH,
            "the same layers by other kernels",
            read("_build_module", "use_liger"),
            rounds=True,
            wants=_GPU,
        ),
    )


_KERNELS: tuple[Setting, ...] = (
    Setting(
        f"{MODEL}.use_fused_kernels",
        "actor",
        _ALL,
        False,
        _BOTH,
        "log-probs and entropy of the same logits, part by part",
        (Reader(_TRAINING, "model_config.use_fused_kernels"),),
        rounds=True,
        # Neither is computed from parts of the logits.
        needs={f"{ACTOR}.calculate_sum_pi_squared": (False,), "distillation.enabled": (False,)},
    ),
    Setting(
        f"{MODEL}.fused_kernel_options.impl_backend",
        "actor",
        _FSDP,
        "torch",
        rules.FUSED,
        "the same sums by other kernels",
        (Reader(f"{_FSDP_ENGINE}._build_module", "fused_kernel_options.impl_backend"),),
        rounds=True,
        needs={f"{MODEL}.use_fused_kernels": (True,)},
    ),
)
_UNFUSED: dict[str, tuple[Value, ...]] = {f"{MODEL}.use_fused_kernels": (False,)}


def _padded(block: str, name: Role, engines: tuple[str, ...], model: str) -> tuple[Setting, ...]:
    """Lengths of packed micro-batches, rounded up to few shapes."""
    fsdp = engines == _FSDP
    forward = f"{_MEGATRON}With{'Value' if name == 'critic' else 'LM'}Head.forward_step"
    target = f"{_FSDP_ENGINE}.__init__" if fsdp else forward
    return (
        Setting(
            f"{block}.pad_to_length",
            name,
            engines,
            False,
            _BOTH,
            "tokens added behind a packed micro-batch are a sequence of their own, without loss",
            (Reader(target, "engine_config.pad_to_length"),),
            rounds=True,
            needs={f"{model}.use_remove_padding": (True,)},
        ),
        Setting(
            f"{block}.pad_to_length_bucket",
            name,
            engines,
            1024 if fsdp else 512,
            rules.powers(256, 4096),
            "as pad_to_length",
            (Reader(target, "engine_config.pad_to_length_bucket"),),
            rounds=True,
            needs={f"{block}.pad_to_length": (True,)},
        ),
    )


def _chunked_entropy(block: str, engines: tuple[str, ...], target: str) -> tuple[Setting, ...]:
    chunking, size = "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"
    # FSDP's engine reads neither key where rows are padded.
    packed: dict[str, tuple[Value, ...]] = {f"{MODEL}.use_remove_padding": (True,)} if engines == _FSDP else {}
    return (
        Setting(
            f"{block}.{chunking}",
            "actor",
            engines,
            False,
            _BOTH,
            "an entropy belongs to one token",
            (Reader(target, f"engine_config.{chunking}"),),
            rounds=True,
            needs=_UNFUSED | packed,
        ),
        Setting(
            f"{block}.{size}",
            "actor",
            engines,
            2048,
            rules.powers(512, 16384),
            "an entropy belongs to one token",
            (Reader(target, f"engine_config.{size}"),),
            rounds=True,
            needs=_UNFUSED | {f"{block}.{chunking}": (True,)},
        ),
    )


def _fsdp(role: str) -> tuple[Setting, ...]:
    """Keys of a role's FSDP engine. A reference, which only computes forward, is offloaded by verl in any case."""
    block, name, trains = f"{role}.{FSDP_BLOCKS[role]}", _NAMES[role], role != REFERENCE
    model = f"{CRITIC}.model" if role == CRITIC else MODEL

    def read(method: str, key: str) -> tuple[Reader, ...]:
        return (Reader(f"{_FSDP_ENGINE}.{method}", f"engine_config.{key}"),)

    shared = (
        Setting(
            f"{block}.reshard_after_forward",
            name,
            _FSDP,
            True,
            _BOTH,
            "parameters are gathered again for the backward pass, or kept",
            read("_build_fsdp_module", "reshard_after_forward"),
        ),
        Setting(
            f"{block}.forward_prefetch",
            name,
            _FSDP,
            False,
            _BOTH,
            "the next layer is gathered earlier",
            (
                *read("_build_fsdp_module", "forward_prefetch"),
                Reader("verl.utils.fsdp_utils:apply_fsdp2", "config.forward_prefetch"),
            ),
        ),
        Setting(
            f"{block}.fsdp_size",
            name,
            _FSDP,
            -1,
            rules.SHARDS,
            "the same parameters in larger or smaller shards",
            read("_init_device_mesh", "fsdp_size"),
            rounds=trains,
            ends_resume=trains,
        ),
        *_padded(block, name, _FSDP, model),
    )
    if not trains:
        return shared
    resident: dict[str, tuple[Value, ...]] = {f"{block}.offload_policy": (False,)}
    offloads = tuple(
        Setting(
            f"{block}.{what}_offload",
            name,
            _FSDP,
            False,
            _BOTH,
            "moved to the host between calls, and back",
            read("__init__", f"{what}_offload"),
            needs=resident,
            wants=_GPU,
        )
        for what in ("param", "optimizer")
    )
    return (
        *shared,
        *offloads,
        Setting(
            f"{block}.offload_policy",
            name,
            ("fsdp2",),
            False,
            _BOTH,
            "parameters live on the host, where the optimizer steps as well",
            read("_build_fsdp_module", "offload_policy"),
            rounds=True,
            wants=_GPU,
        ),
        Setting(
            f"{block}.use_no_sync_for_gradient_accumulation",
            name,
            # FSDP1 adds up the gradients of micro-batches in bf16 between two syncs, FSDP2 in fp32.
            ("fsdp2",),
            False,
            _BOTH,
            "gradients of micro-batches are added on each rank before they are added over ranks",
            (Reader(f"{_FSDP_ENGINE}._gradient_sync_context", "engine_config.use_no_sync_for_gradient_accumulation"),),
            rounds=True,
        ),
        Setting(
            f"{block}.{ULYSSES}",
            name,
            _FSDP,
            1,
            rules.SEQUENCE_RANKS,
            "ranks share a sequence; attention sees all of it, head by head",
            read("_init_device_mesh", ULYSSES),
            rounds=True,
            cuts_mini_batches=True,
            needs={f"{model}.use_remove_padding": (True,)},
            # A size above 1 in the actor's older key replaces the engine's; the critic's older key is not read.
            together=(f"{role}.{ULYSSES}",) if role == ACTOR else (),
        ),
        Setting(
            f"{role}.strategy",
            name,
            _FSDP,
            "fsdp",
            _FSDP,
            "two implementations of one sharding",
            (
                Reader(
                    f"verl.workers.config.{'critic:FSDPCriticConfig' if role == CRITIC else 'actor:FSDPActorConfig'}"
                    ".__post_init__",
                    "self.strategy",
                ),
            ),
            rounds=True,
            ends_resume=True,
            together=(f"{REFERENCE}.strategy",) if role == ACTOR else (),
        ),
    )


_ACTOR_FSDP = f"{ACTOR}.fsdp_config"
_ENTROPY: tuple[Setting, ...] = (
    *_chunked_entropy(_ACTOR_FSDP, _FSDP, _OUTPUTS),
    *_chunked_entropy(f"{ACTOR}.megatron", ("megatron",), f"{_MEGATRON}WithLMHead._lm_head_logits_processor"),
    Setting(
        f"{_ACTOR_FSDP}.entropy_checkpointing",
        "actor",
        _FSDP,
        False,
        _BOTH,
        "the entropy is computed again for its gradient, or kept",
        (Reader(_OUTPUTS, "engine_config.entropy_checkpointing"),),
        needs=_UNFUSED,
    ),
    Setting(
        f"{_ACTOR_FSDP}.use_torch_compile",
        "actor",
        _FSDP,
        True,
        _BOTH,
        "the entropy by compiled kernels; nothing else is compiled",
        (Reader(f"{_FSDP_ENGINE}.__init__", "engine_config.use_torch_compile"),),
        rounds=True,
        needs=_UNFUSED | {f"{MODEL}.use_remove_padding": (True,)},
    ),
)


def _megatron(role: str) -> tuple[Setting, ...]:
    """Keys of a role's Megatron engine. All roles have one layout: the first of them to start divides the ranks."""
    block, name = f"{role}.megatron", _NAMES[role]

    def read(method: str, key: str) -> tuple[Reader, ...]:
        return (Reader(f"{_MEGATRON}.{method}", f"engine_config.{key}"),)

    offloads = tuple(
        Setting(
            f"{block}.{what}_offload",
            name,
            ("megatron",),
            False,
            _BOTH,
            "moved to the host between calls, and back",
            read("__init__", f"{what}_offload"),
            wants=_GPU,
        )
        for what in (("param",) if role == REFERENCE else ("param", "optimizer"))
    )
    model = f"{CRITIC}.model" if role == CRITIC else MODEL
    padded = _padded(block, name, ("megatron",), model)
    return (*offloads, *padded, *(() if role == REFERENCE else _recomputed(block, name)))


def _recomputed(block: str, name: Role) -> tuple[Setting, ...]:
    """Which activations Megatron computes again; verl hands this block to it key by key."""
    block = f"{block}.override_transformer_config"
    again, granularity, method, layers = (
        "activations are computed again, or kept",
        f"{block}.recompute_granularity",
        f"{block}.recompute_method",
        f"{block}.recompute_num_layers",
    )
    handed = Reader(f"{_MEGATRON}._build_tf_config", "engine_config.override_transformer_config")
    layer = Reader(
        f"{_TRANSFORMER}.transformer_block:TransformerBlock._checkpointed_forward", "config.recompute_method"
    )
    return (
        Setting(
            granularity,
            name,
            ("megatron",),
            None,
            (None, "selective", "full"),
            again,
            (
                handed,
                Reader(f"{_TRANSFORMER}.transformer_block:TransformerBlock.forward", "config.recompute_granularity"),
            ),
            sets={
                None: {method: None, layers: None},
                "selective": {method: None, layers: None},
                "full": {method: "uniform", layers: 1},
            },
        ),
        Setting(
            method,
            name,
            ("megatron",),
            None,
            ("uniform", "block"),
            again,
            (handed, layer),
            needs={granularity: ("full",)},
        ),
        Setting(
            layers,
            name,
            ("megatron",),
            None,
            rules.powers(1, 32),
            again,
            (handed, replace(layer, reads="config.recompute_num_layers")),
            needs={granularity: ("full",)},
        ),
        Setting(
            f"{block}.recompute_modules",
            name,
            ("megatron",),
            ["core_attn"],
            (["core_attn"], ["mlp"], ["core_attn", "mlp"]),
            again,
            (
                handed,
                Reader(f"{_TRANSFORMER}.transformer_config:TransformerConfig.__post_init__", "self.recompute_modules"),
            ),
            needs={granularity: ("selective",)},
        ),
    )


def _layout(size: str, default: Value, values: Rule, reason: str, *, cuts: bool, experts: bool = False) -> Setting:
    return Setting(
        f"{ACTOR}.megatron.{size}",
        "actor",
        ("megatron",),
        default,
        values,
        reason,
        (Reader(f"{_MEGATRON}._init_device_mesh", f"engine_config.{size}"),),
        rounds=True,
        cuts_mini_batches=cuts,
        ends_resume=True,
        wants=_EXPERTS if experts else frozenset(),
        together=(f"{REFERENCE}.megatron.{size}", f"{CRITIC}.megatron.{size}"),
    )


_LAYOUTS: tuple[Setting, ...] = (
    _layout("tensor_model_parallel_size", 1, rules.MODEL_RANKS, "ranks share each layer's products", cuts=True),
    _layout("pipeline_model_parallel_size", 1, rules.MODEL_RANKS, "ranks have some layers each", cuts=True),
    _layout(
        "context_parallel_size", 1, rules.MODEL_RANKS, "ranks share a sequence; attention sees all of it", cuts=True
    ),
    _layout(
        "virtual_pipeline_model_parallel_size", None, rules.VIRTUAL_STAGES, "stages have layers in chunks", cuts=False
    ),
    _layout(
        "expert_model_parallel_size",
        1,
        rules.EXPERT_RANKS,
        "experts are divided, not changed",
        cuts=False,
        experts=True,
    ),
    _layout(
        "expert_tensor_parallel_size",
        None,
        rules.EXPERT_TENSOR_RANKS,
        "ranks share each expert's products",
        cuts=False,
        experts=True,
    ),
)

TABLE: tuple[Setting, ...] = (
    *_ROLLOUT,
    *_PASSES,
    *_model(ACTOR, MODEL),
    *_model(CRITIC, f"{CRITIC}.model"),
    *_KERNELS,
    *(setting for role in FSDP_BLOCKS for setting in _fsdp(role)),
    *_ENTROPY,
    *(setting for role in FSDP_BLOCKS for setting in _megatron(role)),
    *_LAYOUTS,
)
BY_KEY: dict[str, Setting] = {setting.key: setting for setting in TABLE}


def setting_of(key: str) -> Setting | None:
    """Return the setting that sets a key, its own or one that gets the same value; None where there is none."""
    return BY_KEY.get(key) or next((each for each in TABLE if key in each.together), None)


def on_trained_side(key: str) -> bool:
    """Tell whether a key changes how models are trained and computed, and not how the rollout generates."""
    setting = setting_of(key)
    return setting is not None and setting.role in _NAMES.values()
