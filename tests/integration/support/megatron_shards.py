"""Prints, for lines of [model, text of a layout, fused: compare with mbridge as well], how every rank's tensors of the
layout differ from Megatron's.

Names and shapes are those of a `GPTModel` built on each rank; contents those that mbridge makes of a checkpoint and
splits over tensor ranks. Processes are not needed: torch's fake process group plays one rank after the other.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "reshard"))
from layouts import MOE, QWEN2, QWEN3
from transfers import content, tensors_of

from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.text import sharding_from

MODELS = {weights.model.name: weights for weights in (QWEN2, QWEN3, MOE)}


def config(weights: ModelParameters, layout) -> TransformerConfig:
    model = weights.model
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate,
        num_moe_experts=model.experts or None,
        moe_ffn_hidden_size=model.intermediate if model.experts else None,
        moe_shared_expert_intermediate_size=model.shared_intermediate or None,
        moe_shared_expert_gate=bool(model.shared_intermediate),
        # A bias that balances experts, as DeepSeek-V3's.
        moe_router_enable_expert_bias=bool(model.experts),
        moe_router_score_function="sigmoid" if model.experts else "softmax",
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias="self_attn.q_proj.bias" in str(weights.index),
        qk_layernorm="self_attn.q_norm" in str(weights.index),
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def stage(weights: ModelParameters, layout, vocabulary: int) -> GPTModel:
    """This rank's part of the model."""
    made, model = config(weights, layout), weights.model
    layer = get_gpt_layer_local_spec(
        num_experts=model.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=made.qk_layernorm,
        normalization="RMSNorm",
    )
    return GPTModel(
        made,
        layer,
        vocabulary,
        8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
    )


def from_mbridge(weights: ModelParameters, model: GPTModel, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values that mbridge loads into this rank's split tensors; norms are named by another
    implementation and left out."""
    from mbridge.models.qwen2 import Qwen2Bridge
    from transformers import AutoConfig

    sizes = weights.model
    bridge = Qwen2Bridge(
        AutoConfig.for_model(
            "qwen2",
            num_hidden_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate,
            vocab_size=sizes.vocabulary,
        ),
        dtype=torch.float32,
    )
    rank, degree = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    found = {}
    for name, tensor in model.named_parameters():
        if "norm" in name or "word_embeddings" in name:
            continue
        parts = [whole[key] for key in bridge._weight_name_mapping_mcore_to_hf(name)]
        parts = [part.view(-1) if name.endswith(".bias") else part for part in parts]
        fused = bridge._weight_to_mcore_format(name, parts)
        found[name] = bridge._weight_split_across_tp(name, fused, tensor, degree)[rank]
    return found


def differences(weights: ModelParameters, text: str, contents: bool) -> list[str]:
    sharding, whole, wrong = sharding_from(text), content(weights), []
    for rank in range(sharding.devices):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sharding.devices)
        parallel_state.initialize_model_parallel(
            sharding.layout.tp,
            sharding.layout.pp,
            expert_model_parallel_size=sharding.layout.ep,
            create_gloo_process_groups=False,
        )
        model = stage(weights, sharding.layout, sharding.vocabulary or weights.model.vocabulary)
        theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        tensors = tensors_of(PlacedSharding.at(sharding), weights, rank, whole)
        ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wrong += [f"rank {rank}: {pair}" for pair in sorted(ours.items() ^ theirs.items())]
        if contents:
            loaded = from_mbridge(weights, model, whole)
            wrong += [
                f"rank {rank}: content of {name}" for name in loaded if not torch.equal(loaded[name], tensors[name])
            ]
            wrong += [] if len(loaded) > 20 else [f"rank {rank}: only {len(loaded)} tensors compared"]
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    # All that a model needs to be built without an accelerator.
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor: tensor
    initialize_rng_tracker(inference_rng_tracker=True)
    for line in sys.stdin:
        name, text, contents = json.loads(line)
        print(json.dumps(differences(MODELS[name], text, contents)), flush=True)
