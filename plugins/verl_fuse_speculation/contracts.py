"""Contracts: the code of vLLM that makes a drafter, asks the drafter, and verifies its drafts; speculation rests on
that code.

Verification is promised to keep the distribution: the code was read at vLLM 0.24 to 0.31, and other code is refused
until somebody has read it too. vLLM 0.30 is refused: its kernels for CPUs do not reach the functions that launch them.
"""

from verl_fuse.host.upstream.targets import MODEL_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Code, Contract, config_keys, names

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
    *names("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer"),
    *names(RUNNER, "propose_draft_token_ids _input_fits_in_drafter"),
    *names("vllm.config:VllmConfig", "additional_config speculative_config model_config parallel_config"),
    *names("vllm.config:SpeculativeConfig", "num_speculative_tokens"),
    # The folder is named here, and the hash leaves the folder out.
    *names("vllm.config:SpeculativeConfig", "draft_load_config compute_hash"),
    *names("vllm.config:LoadConfig", "download_dir"),
    *names("vllm.config:ModelConfig", "max_model_len hf_config get_vocab_size()"),
    *names("vllm.config:ParallelConfig", "rank"),
    # vLLM refuses these sampling parameters together with drafts.
    *names("vllm.sampling_params:SamplingParams", "_validate_spec_decode"),
    # verl-fuse's scheduler extends this code of vLLM's (scheduler.py), and this code reads its outputs.
    *names("vllm.config:SchedulerConfig", "scheduler_cls"),
    *names("vllm.v1.core.sched.scheduler:Scheduler", "update_from_output update_draft_token_ids", closed=True),
    *names("vllm.v1.core.sched.scheduler:Scheduler", "requests"),
    *names("vllm.sampling_params:SamplingParams", "thinking_token_budget"),
    *names("vllm.v1.outputs:LogprobsLists", "slice_request"),
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
    *config_keys(
        ROLLOUT_YAML,
        "name:str engine_kwargs.vllm:any pipeline_model_parallel_size:any full_determinism:any "
        "enable_rollout_routing_replay disaggregation.enabled:any checkpoint_engine.backend:any",
    ),
    *config_keys(MODEL_YAML, "mtp.enable_rollout"),
    Attribute("verl.workers.config:RolloutConfig.repetition_penalty", "1.0"),
)
