"""Contracts: the code of vLLM that makes a drafter, asks the drafter, and verifies its drafts; speculation rests on
that code.

Verification is promised to keep the distribution: the code was read at vLLM 0.24 to 0.31, and other code is refused
until somebody has read it too. vLLM 0.30 is refused: its kernels for CPUs do not reach the functions that launch them.
"""

from verl_fuse.host.upstream.targets import MODEL_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Code, ConfigKey, Contract, Function

PROMISE = "speculation keeps the distribution"
SAMPLER = "vllm.v1.sample.rejection_sampler"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
MIN_TOKENS = ",".join(
    f"MinTokensLogitsProcessor.{name}" for name in ("update_state", "apply", "apply_with_spec_decode")
)
VERIFICATION = (
    "rejection_sample,apply_sampling_constraints,expand_batch_to_tokens,generate_uniform_probs,sample_recovered_tokens"
)

CONTRACTS: tuple[Contract, ...] = (
    # vLLM makes verl-fuse's drafter and calls it with this code; the drafter reads these attributes.
    Function("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", "(vllm_config)", "3e2a0748c8ba1e85"),
    Function(
        f"{RUNNER}.propose_draft_token_ids",
        "(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, "
        "aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings)",
        "6abbc7a6221cf27c",
    ),
    Function(f"{RUNNER}._input_fits_in_drafter", "(self, common_attn_metadata)", "a255d180c85827e6"),
    Attribute("vllm.config:VllmConfig.additional_config"),
    Attribute("vllm.config:VllmConfig.speculative_config"),
    Attribute("vllm.config:VllmConfig.model_config"),
    Attribute("vllm.config:VllmConfig.parallel_config"),
    Attribute("vllm.config:SpeculativeConfig.num_speculative_tokens"),
    # The folder is named here, and the hash leaves the folder out.
    Attribute("vllm.config:SpeculativeConfig.draft_load_config"),
    Attribute("vllm.config:LoadConfig.download_dir"),
    Function(
        "vllm.config:SpeculativeConfig.compute_hash",
        "(self)",
        (
            "8eed83a1d56caa39",
            "df8bc82383d2f890",
            "83f971797b9b7eb0",
            "06731207223d0945",
            "50bbc5ffd0cbc98f",
            "7f25d8fb86e7748c",
        ),
    ),
    Attribute("vllm.config:ModelConfig.max_model_len"),
    Attribute("vllm.config:ModelConfig.hf_config"),
    Function("vllm.config:ModelConfig.get_vocab_size", "(self)"),
    Attribute("vllm.config:ParallelConfig.rank"),
    # vLLM refuses these sampling parameters together with drafts.
    Function(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "(self, speculative_config)",
        ("35aed4c25a5dad28", "77ba7d689a7f9298", "e593adb97d7fc3dd"),
    ),
    # verl-fuse's scheduler extends this code of vLLM's (scheduler.py), and this code reads its outputs.
    Attribute("vllm.config:SchedulerConfig.scheduler_cls"),
    Function(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "(self, scheduler_output, model_runner_output)",
        (
            "35402d4f7de7ec2a",
            "dacc37bf1d73ae71",
            "d6c3f4f60ee8c678",
            "722a5d82a2bde1de",
            "df9cc9f022298955",
            "0aba83d3a3b135ca",
            "f1bbf1019e4767dd",
            "39ff92367cee83ed",
        ),
        closed=True,
    ),
    Function(
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "(self, draft_token_ids)",
        ("1e895699c83f4f08", "d2bc7920d13ea44f"),
        closed=True,
    ),
    Attribute("vllm.v1.core.sched.scheduler:Scheduler.requests"),
    Attribute("vllm.sampling_params:SamplingParams.thinking_token_budget"),
    Function("vllm.v1.outputs:LogprobsLists.slice_request", "(self, req_idx, num_positions)", "552dd3ba0604e412"),
    Code(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        ("e23266e2c3a03d04", "94c8bc8c2b321078", "3533699ad6fbf460", "d6706d685d6d9710", "deea7596e9d9b359"),
        promise=PROMISE,
    ),
    Code(
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update,check_stop_strings",
        ("edc3122dc281ab90", "17a0aef65116b1a5"),
        promise=PROMISE,
    ),
    Code(
        f"vllm.v1.sample.logits_processor.builtin:{MIN_TOKENS},MinTokensLogitsProcessor._mask_stop_token_logits,MinTokensLogitsProcessor.add_request",
        ("35c4ae538f21a813", "d061c41f108f6d2e"),
        promise=PROMISE,
        before=(f"vllm.v1.sample.logits_processor.builtin:{MIN_TOKENS}",),
    ),
    # This code verifies drafts.
    Code(
        f"{SAMPLER}:RejectionSampler.__init__,RejectionSampler.forward,RejectionSampler.apply_logits_processors,RejectionSampler.parse_output,RejectionSampler._get_logprobs_tensors",
        ("3d8446d7a5180655", "be71774c0c9fd899", "a436e45a5cc1d420", "9988d6db85c6b668"),
        promise=PROMISE,
    ),
    Code(
        f"{SAMPLER}:{VERIFICATION},_rejection_greedy_sample,_rejection_random_sample,_expand,_sample_recovered_tokens",
        ("8ee1b075f93039c3", "fdc0b8300036e558"),
        promise=PROMISE,
        before=(f"{SAMPLER}:{VERIFICATION}",),
    ),
    # This code binds the arguments of kernels; before 0.30 the functions above did.
    Code(
        "vllm.model_executor.warmup.jit_warmup_triton_helper:_launch_binding_plan,VllmTritonJitKernel._prepare_launch_kwargs,VllmTritonJitKernel.launch,_DecoratedTritonJitKernel.__call__,triton_kernel_dispatcher_with_warmup",
        ("c4b1e69e50f194ff", "8ee1b075f93039c3"),
        promise=PROMISE,
        before=(f"{SAMPLER}:{VERIFICATION}",),
    ),
    Code(
        f"{SAMPLER}:rejection_greedy_sample_kernel,rejection_random_sample_kernel,expand_kernel,sample_recovered_tokens_kernel",
        ("84c9dafb399a71a6", "1438471c16161f04"),
        promise=PROMISE,
    ),
    Code(
        "vllm.v1.sample.sampler:Sampler.forward,Sampler.sample,Sampler.apply_temperature",
        "1fd375cda0a51586",
        promise=PROMISE,
    ),
    Code(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        ("f42f34d25a31a720", "c1698ff6bd4095f8"),
        promise=PROMISE,
    ),
    Code(f"{RUNNER}._sample", "e1a73c9cc7a6b7ff", promise=PROMISE),
    # This code does the same on a CPU; the kernels that are wrong there are patched (patches/).
    Code(
        "vllm.utils.cpu_triton_utils:_rejection_greedy_sample_kernel_impl,_rejection_random_sample_kernel_impl,_sample_recovered_tokens_kernel_impl,_ensure_int64",
        ("459a65c3855fd4a8", "67bfa5cd89b51582"),
        promise=PROMISE,
    ),
    # The kernels take the places of Triton's: since 0.31 through the platform, before it through the model runner.
    Code(
        "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
        ("2587e0cdde66c09b", "39ce2d5624e6b832", "93f89e636c8a11c1", "08482ee6f77c272a"),
        promise=PROMISE,
        before=("vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton",),
    ),
    Code(
        "vllm.triton_utils.dispatcher:KernelOverride.__init__,KernelOverride.__getitem__,KernelOverride._launch,_kernel_arg_names,_resolve_kernel,_rebind_kernels,register_kernels",
        ("6ebc8b9b17b197de", "2587e0cdde66c09b", "39ce2d5624e6b832", "93f89e636c8a11c1"),
        promise=PROMISE,
        before=("vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton",),
    ),
    # This configuration is refused (refusals.py).
    ConfigKey(ROLLOUT_YAML, "name", str),
    ConfigKey(ROLLOUT_YAML, "engine_kwargs.vllm", object),
    ConfigKey(ROLLOUT_YAML, "pipeline_model_parallel_size", object),
    ConfigKey(ROLLOUT_YAML, "full_determinism", object),
    ConfigKey(ROLLOUT_YAML, "enable_rollout_routing_replay", False),
    ConfigKey(ROLLOUT_YAML, "disaggregation.enabled", object),
    ConfigKey(ROLLOUT_YAML, "checkpoint_engine.backend", object),
    ConfigKey(MODEL_YAML, "mtp.enable_rollout", False),
    Attribute("verl.workers.config:RolloutConfig.repetition_penalty", "1.0"),
)
