"""Declares contracts: the code of vLLM that makes a drafter, asks the drafter, and verifies its drafts; the
configuration refused (refusals.py).

Verification is promised to keep the distribution: the code was read at vLLM 0.24 to 0.31, and other code is refused
until somebody has read it too. vLLM 0.30 is refused: its kernels for CPUs do not reach the functions that launch them.
"""

from functools import partial

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Contract, config, kept, names

_kept = partial(kept, "speculation keeps the distribution")
SAMPLER = "vllm.v1.sample.rejection_sampler:RejectionSampler"
KERNELS = "vllm.v1.sample.rejection_sampler:rejection_greedy_sample_kernel :rejection_random_sample_kernel"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MIN_TOKENS = (
    "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.update_state .apply .apply_with_spec_decode"
)
VERIFICATION = (
    "vllm.v1.sample.rejection_sampler:rejection_sample :apply_sampling_constraints :expand_batch_to_tokens "
    ":generate_uniform_probs :sample_recovered_tokens"
)
POSTPROCESS = "vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton"

CONTRACTS: tuple[Contract, ...] = (
    # vLLM makes verl-fuse's drafter and calls it with this code; the drafter reads these attributes. Its folder is
    # named in `download_dir`, and the hash leaves it out. vLLM refuses some sampling parameters together with drafts.
    *names(f"vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer {RUNNER}.propose_draft_token_ids"),
    *names(f"{RUNNER}._input_fits_in_drafter vllm.config:VllmConfig.additional_config .speculative_config"),
    *names("vllm.config:VllmConfig.model_config .parallel_config :SpeculativeConfig.num_speculative_tokens"),
    *names("vllm.config:SpeculativeConfig.draft_load_config .compute_hash :ModelConfig.max_model_len .hf_config"),
    *names("vllm.config:ModelConfig.get_vocab_size() :ParallelConfig.rank :LoadConfig.download_dir"),
    *names("vllm.sampling_params:SamplingParams._validate_spec_decode .thinking_token_budget"),
    # verl-fuse's scheduler extends this code of vLLM's (scheduler.py), and this code reads its outputs.
    *names("vllm.config:SchedulerConfig.scheduler_cls vllm.v1.outputs:LogprobsLists.slice_request"),
    *names(f"{SCHEDULER}.requests"),
    *names(f"{SCHEDULER}.update_from_output .update_draft_token_ids", closed=True),
    _kept("vllm.v1.engine.output_processor:OutputProcessor.process_outputs"),
    _kept("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update :check_stop_strings"),
    _kept(f"{MIN_TOKENS} ._mask_stop_token_logits .add_request", before=MIN_TOKENS),
    # This code verifies drafts.
    _kept(f"{SAMPLER}.__init__ .forward .apply_logits_processors .parse_output ._get_logprobs_tensors"),
    _kept(
        f"{VERIFICATION} :_rejection_greedy_sample :_rejection_random_sample :_expand :_sample_recovered_tokens",
        before=VERIFICATION,
    ),
    # This code binds the arguments of kernels; before 0.30 the functions above did.
    _kept(
        "vllm.model_executor.warmup.jit_warmup_triton_helper:_launch_binding_plan "
        ":VllmTritonJitKernel._prepare_launch_kwargs .launch :_DecoratedTritonJitKernel.__call__ "
        ":triton_kernel_dispatcher_with_warmup",
        before=VERIFICATION,
    ),
    _kept(f"{KERNELS} :expand_kernel :sample_recovered_tokens_kernel"),
    _kept("vllm.v1.sample.sampler:Sampler.forward .sample .apply_temperature"),
    _kept("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p"),
    _kept(f"{RUNNER}._sample"),
    # This code does the same on a CPU; the kernels that are wrong there are patched (patches/).
    _kept(
        "vllm.utils.cpu_triton_utils:_rejection_greedy_sample_kernel_impl :_rejection_random_sample_kernel_impl "
        ":_sample_recovered_tokens_kernel_impl :_ensure_int64",
    ),
    # The kernels take the places of Triton's: since 0.31 through the platform, before it through the model runner.
    _kept("vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides", before=POSTPROCESS),
    _kept(
        "vllm.triton_utils.dispatcher:KernelOverride.__init__ .__getitem__ ._launch :_kernel_arg_names "
        ":_resolve_kernel :_rebind_kernels :register_kernels",
        before=POSTPROCESS,
    ),
    *config(f"{t.ROLLOUT_YAML} name:str engine_kwargs.vllm:any pipeline_model_parallel_size:any full_determinism:any"),
    *config(f"{t.ROLLOUT_YAML} enable_rollout_routing_replay disaggregation.enabled:any checkpoint_engine.backend:any"),
    *config(f"{t.MODEL_YAML} mtp.enable_rollout"),
    *names("verl.workers.config:RolloutConfig.repetition_penalty="),
)
