"""The copies of a slice compute what the models of verl's own workers compute, whatever setting of an engine differs
between actor, critic and reference.

Real workers of verl on FSDP2, one process of the cpu platform; settings that cannot be copied are refused
(tests/unit/interstage/test_refusals.py). Shows the invariants in the docstring of
plugins/verl_fuse_interstage/slices/models.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from slice_copies import FAMILIES, adapted, built, configuration, kept, numbers, settings, write_family, write_models
from small_engines import Ranks, cpu_server

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BF16 = "{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}"
# By what differs from the two other models.
SETTINGS = {
    "reference": [
        f"{REF}.fsdp_config.model_dtype=bf16",
        f"{REF}.fsdp_config.reshard_after_forward=false",
        f"{REF}.fsdp_config.offload_policy=true",
        f"{REF}.fsdp_config.dtype=float16",
        f"{REF}.log_prob_micro_batch_size_per_gpu=2",
    ],
    "actor": [
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
        f"{ACTOR}.fsdp_config.forward_prefetch=true",
        f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[LlamaMLP]",
        f"{ACTOR}.fsdp_config.entropy_checkpointing=true",
        f"{ACTOR}.fsdp_config.seed=7",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        # verl's default, bfloat16.
        f"{CRITIC}.fsdp.mixed_precision=null",
    ],
    "critic": [
        f"{CRITIC}.fsdp.model_dtype=bf16",
        f"{CRITIC}.fsdp.use_dynamic_bsz=false",
        f"{CRITIC}.fsdp.infer_micro_batch_size_per_gpu=4",
        f"{CRITIC}.fsdp.fsdp_size=1",
        f"{CRITIC}.fsdp.use_orig_params=true",
        f"{CRITIC}.fsdp.use_torch_compile=true",
        f"{CRITIC}.model.override_config.attn_implementation=eager",
        f"{CRITIC}.model.enable_gradient_checkpointing=true",
        f"{CRITIC}.model.enable_activation_offload=true",
        f"{ACTOR}.fsdp_config.mixed_precision={BF16}",
    ],
    # verl takes bfloat16 for a forward-only engine then, and float32 for a trained one.
    "no dtype": [
        f"{engine}.model_dtype=null" for engine in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", f"{CRITIC}.fsdp")
    ],
}
# They change classes of their process, so each case has one of its own.
PATCHING = {
    "packed policy": [
        f"{MODEL}.use_remove_padding=true",
        f"{MODEL}.override_config.attn_implementation=eager",
        f"{ACTOR}.fsdp_config.pad_to_length=true",
        f"{ACTOR}.fsdp_config.pad_to_length_bucket=16",
        f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking=true",
        f"{ACTOR}.fsdp_config.entropy_from_logits_chunk_size=4",
        f"{ACTOR}.fsdp_config.full_determinism=true",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=32",
        f"{REF}.log_prob_use_dynamic_bsz=false",
        f"{CRITIC}.ppo_infer_max_token_len_per_gpu=20",
    ],
    "fused kernels": [
        f"{MODEL}.use_fused_kernels=true",
        f"{MODEL}.fused_kernel_options.impl_backend=torch",
        f"{CRITIC}.model.use_remove_padding=true",
    ],
}
# What reduced precision changes: were it the wrong model's, these numbers would not be its own.
CHANGED = {
    "reference": {"ref_log_prob"},
    "actor": {"old_log_probs", "entropy", "values"},
    "critic": {"old_log_probs", "entropy", "values"},
    "no dtype": {"ref_log_prob"},
}
# The other settings that verl has, by why no case varies them.
OTHERS = {
    "refused with slices (tests/unit/interstage/test_refusals.py)": "ulysses_sequence_parallel_size qat lora "
    "lora_adapter_path",
    "of adapters, in tests of their own": "lora_rank lora_alpha target_modules",
    "of adapters, read by the code that builds policy and copy": "target_parameters exclude_modules",
    "of one FSDP, fsdp2, here: the other, fsdp: test_flat_shards.py; Megatron: test_megatron_slices.py": "strategy "
    "router_replay turbo_config",
    "what the copy is": "forward_only model_type",
    "read by training alone": "max_token_len_per_gpu micro_batch_size_per_gpu use_no_sync_for_gradient_accumulation",
    "set by verl from keys that are varied": "infer_max_token_len_per_gpu",
    "where the model lies, and what is read of it beside its weights; the paths of policy and critic differ in all "
    "cases": (
        "path local_path hf_config_path local_hf_config_path tokenizer_path local_tokenizer_path load_tokenizer "
        "hf_config generation_config "
        "tokenizer processor use_shm trust_remote_code custom_chat_template external_lib architectures"
    ),
    "not read by verl's FSDP engine": "tiled_mlp mtp",
    "kernels that need an accelerator": "use_liger",
}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """The configuration; meanwhile ranks have the cpu platform."""
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_models(folder)
        yield configuration(folder)


@pytest.fixture(scope="module")
def rank(composed: dict) -> Iterator[Ranks]:
    with Ranks(1) as rank:
        yield rank


def furthest(pairs: list) -> float:
    own, copied = pairs
    return max(float(np.abs(a - b).max()) for a, b in zip(own, copied, strict=True))


@pytest.fixture(scope="module")
def plain(rank: Ranks, composed: dict) -> dict:
    """The numbers where all models have the same settings."""
    return rank.call(numbers, composed, [])[0]


def test_copies_compute_the_numbers_of_their_models(plain: dict):
    assert {field: furthest(pairs) for field, pairs in plain.items()} == dict.fromkeys(
        ("old_log_probs", "entropy", "ref_log_prob", "values"), 0.0
    )


@pytest.mark.parametrize("case", ["padded", "packed policy"])
def test_copies_and_models_have_logits_of_responses_alone(composed: dict, plain: dict, case: str):
    with Ranks(1) as rank:
        found = rank.call(numbers, composed, PATCHING.get(case, []), True)[0]
    assert {field: furthest(pairs) for field, pairs in found.items()} == dict.fromkeys(found, 0.0)
    # Values have no logits.
    assert max(furthest([plain[field][0], found[field][0]]) for field in found) < 1e-6


def test_copies_and_models_compute_each_prompt_once(composed: dict, plain: dict):
    tokens = [
        f"{ACTOR}.use_dynamic_bsz=true",
        *(f"{node}.log_prob_use_dynamic_bsz=true" for node in (ROLLOUT, REF)),
        *(f"{node}.log_prob_max_token_len_per_gpu=256" for node in (ROLLOUT, REF)),
    ]
    with Ranks(1) as rank:
        found = rank.call(numbers, composed, tokens, True, True)[0]
    assert {field: furthest(pairs) for field, pairs in found.items()} == dict.fromkeys(found, 0.0)
    assert max(furthest([plain[field][0], found[field][0]]) for field in found) < 2e-6


@pytest.mark.parametrize("case", SETTINGS)
def test_a_copy_has_the_settings_of_its_own_model(rank: Ranks, composed: dict, plain: dict, case: str):
    check(rank.call(numbers, composed, SETTINGS[case])[0], plain, case)


@pytest.mark.parametrize("case", PATCHING)
def test_a_copy_has_the_settings_of_its_own_model_where_they_change_its_process(composed: dict, plain: dict, case: str):
    with Ranks(1) as rank:
        check(rank.call(numbers, composed, PATCHING[case])[0], plain, case)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_of_every_family_compute_the_numbers_of_their_models(
    rank: Ranks, composed: dict, tmp_path: Path, family: str
):
    path = write_family(tmp_path, family)
    eager = "{attn_implementation: eager}"
    # transformers has no value head for Gemma 3, so verl has no critic of it.
    models = (MODEL,) if family == "gemma3_text" else (MODEL, "critic.model")
    changes = [f"{name}.path={path}" for name in models]
    changes += [f"{name}.override_config={eager}" for name in (MODEL, "critic.model")]
    found = rank.call(numbers, composed, changes)[0]
    assert {field: furthest(pairs) for field, pairs in found.items()} == dict.fromkeys(
        ("old_log_probs", "entropy", "ref_log_prob", "values"), 0.0
    )


@pytest.fixture(scope="module")
def of_copies(rank: Ranks, composed: dict) -> dict:
    """What a slice keeps where the actor computes in bfloat16 and the others in float32; the reference is not
    resharded after a forward pass."""
    changes = [
        f"{ACTOR}.fsdp_config.mixed_precision={BF16}",
        f"{REF}.fsdp_config.reshard_after_forward=false",
        # Two micro-batches a call.
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{CRITIC}.ppo_infer_max_token_len_per_gpu=60",
    ]
    return rank.call(kept, composed, changes)[0]


def test_a_copy_keeps_its_parameters_in_the_dtype_it_computes_in_and_its_buffers_as_they_are(of_copies: dict):
    dtypes = {"old_log_prob": "torch.bfloat16", "ref": "torch.float32", "values": "torch.float32"}
    assert {stage: of["parameters"] for stage, of in of_copies.items()} == {s: {d} for s, d in dtypes.items()}
    assert {stage: of["buffers"] for stage, of in of_copies.items()} == {stage: {"torch.float32"} for stage in dtypes}


@pytest.mark.parametrize("stage", ["old_log_prob", "ref", "values"])
def test_weights_are_copied_to_the_device_once_and_not_for_each_micro_batch(of_copies: dict, stage: str):
    of = of_copies[stage]
    first, second, released = of["copies"]
    assert (first, second) == (of["shards"], 0)
    assert released > 0, "verl copies shards in every forward pass"
    assert of["equal"]
    assert of["gathered"] == []


@pytest.mark.parametrize("stage", ["old_log_prob", "ref", "values"])
def test_a_forward_pass_leaves_no_tensor_to_the_collection_of_garbage(of_copies: dict, stage: str):
    assert of_copies[stage]["in circles"] == []


def test_a_rank_says_how_large_its_model_is(of_copies: dict):
    said = {stage: of["memory"] for stage, of in of_copies.items()}
    assert {stage: (memory.node, memory.device) for stage, memory in said.items()} == dict.fromkeys(
        said, ("here", None)
    )
    # verl offloads a forward-only model.
    assert {stage: memory.kept for stage, memory in said.items()} == dict.fromkeys(said, 0)
    widths = {"old_log_prob": 2, "ref": 4, "values": 4}
    assert {s: memory.shard for s, memory in said.items()} == {
        s: widths[s] * sum(memory.parameters) for s, memory in said.items()
    }
    policy, value = said["ref"], said["values"]
    assert (policy.parameters, policy.outputs > 1) == (said["old_log_prob"].parameters, True)
    assert (value.outputs, value.parameters != policy.parameters) == (1, True)


def check(found: dict, plain: dict, case: str) -> None:
    """Bitwise the numbers of the model, and other ones than without the setting where that changes them."""
    assert {field: furthest(pairs) for field, pairs in found.items()} == dict.fromkeys(found, 0.0)
    changed = {field for field in found if furthest([plain[field][0], found[field][0]]) > 1e-4}
    assert changed == CHANGED.get(case, set())


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [f"{ACTOR}.fsdp_config.mixed_precision={BF16}", f"{MODEL}.target_modules=[q_proj,v_proj]"],
        [f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.fsdp_config.mixed_precision={BF16}"],
    ],
    ids=["float32", "bfloat16 computed", "bfloat16 kept"],
)
def test_with_lora_one_copy_serves_policy_and_reference_and_takes_adapters_each_step(
    rank: Ranks, composed: dict, changes: list[str]
):
    lora = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"]
    found = rank.call(adapted, composed, [*lora, *changes])[0]
    assert found["models"] == 1
    assert found["far"] == [{"old_log_probs": 0.0, "entropy": 0.0, "ref_log_prob": 0.0}] * 2
    assert all(apart > 1e-2 for apart in found["apart"]), "adapters change what the policy says"
    whole, adapters = found["bytes"]
    assert 0 < adapters < 0.5 * whole


def test_no_reference_is_built_where_none_is_computed(rank: Ranks, composed: dict):
    """verl's own defaults for a reference nobody asks for: no engine can be built from them."""
    defaults = [f"{REF}.log_prob_micro_batch_size_per_gpu=null", f"{REF}.log_prob_use_dynamic_bsz=false"]
    assert rank.call(built, composed, ["old_log_prob"], defaults) == [["old_log_prob"]]


def test_every_setting_of_an_engine_is_accounted_for(rank: Ranks):
    (known,) = rank.call(settings)
    overrides = [text for case in (*SETTINGS.values(), *PATCHING.values()) for text in case]
    varied = {part for text in overrides for part in text.partition("=")[0].split(".")}
    others = [name for names in OTHERS.values() for name in names.split()]
    assert sorted((varied & set(known)) | set(others)) == known
    assert not varied & set(others)
