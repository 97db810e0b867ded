"""A Qwen3-MoE of four experts in Megatron's own GPTModel on four gloo ranks, experts shared out.

verl builds such a model with Transformer Engine alone, which needs an accelerator; here are Megatron's local layers,
with as much of an engine around them as a sync or a slice looks at.
"""

import os
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading_ranks import EXPERTS, SMALL, compared
from ranks import World

OPTIONS = {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 8, "tie_word_embeddings": False, **EXPERTS}


def write(folder: Path) -> None:
    """The random model, as a Hugging Face checkpoint."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SMALL | OPTIONS, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def whole(folder: Path) -> dict[str, Any]:
    """The checkpoint: every expert by itself."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@contextmanager
def _without_accelerator() -> Any:
    import torch

    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as silence, redirect_stdout(silence):
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.Tensor, "cuda", lambda tensor, *_: tensor)
        yield


def engine(world: World, folder: Path, layout: Any, content: dict[str, Any] | None) -> Any:
    """The model cut by `layout`, with this content, or none.

    Where experts go, Megatron says; all else is put where mbridge puts it (test_megatron_shards).
    """
    import torch
    import transformers
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron_shards import stage
    from transfers import tensors_of

    from verl_fuse.reshard.megatron import MegatronSharding
    from verl_fuse.reshard.parameters import parameters_of
    from verl_fuse.reshard.sharding import PlacedSharding
    from verl_fuse.spec.model import Model

    config = transformers.AutoConfig.from_pretrained(folder)
    weights = parameters_of(Model.from_hf(config.to_dict(), config.model_type), config.model_type)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, create_gloo_process_groups=False
        )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    model = stage(weights, layout, weights.model.vocabulary)
    if content is not None:
        matrices = {name: tensor.view(tensor.shape[0], -1) for name, tensor in content.items()}
        sharding = PlacedSharding.at(MegatronSharding(layout, transformer_engine=False))
        own = tensors_of(sharding, weights, world.rank, matrices)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.full_like(parameter, torch.nan) if ".experts." in name else own[name])
            for block in model.decoder.layers:
                block.mlp.router.expert_bias.copy_(_bias(block))
                _put_experts(block, content, layout.tp)
    described = SimpleNamespace(hf_config=config)
    return SimpleNamespace(module=[model], model_config=described, is_param_offload_enabled=False)


def _bias(block: Any) -> Any:
    import torch

    return torch.arange(4.0) / 3 + block.layer_number


def _put_experts(block: Any, content: dict[str, Any], tp: int) -> None:
    import torch
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_tensor_parallel_rank()
    for number, expert in zip(block.mlp.local_expert_indices, block.mlp.experts.local_experts, strict=True):
        prefix = f"model.layers.{block.layer_number - 1}.mlp.experts.{number}"
        gate, up, down = (content[f"{prefix}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        expert.linear_fc1.weight.copy_(torch.cat([part.chunk(tp)[rank] for part in (gate, up)]))
        expert.linear_fc2.weight.copy_(down.chunk(tp, dim=1)[rank])


def loaded(world: World, folder: Path, tp: int) -> dict[str, Any]:
    """vLLM's model from a sync of two expert ranks' shards against the one from the whole checkpoint."""
    from verl_fuse.spec.layout import Layout

    checkpoint = whole(folder)
    with _without_accelerator():
        trained = engine(world, folder, Layout(tp=2, dp=2, ep=2), checkpoint)
    return compared(world, "experts", folder, trained, checkpoint, tp, "float32")


def taken(world: World, folder: Path) -> dict[str, Any]:
    """By how a slice's model is cut: names of its tensors that differ from the whole checkpoint's once it has what two
    expert ranks left, and how many parts it has."""
    import torch
    import torch.distributed as dist

    from verl_fuse.host.weights.buckets import fill
    from verl_fuse.host.weights.whole_megatron import held_parts, own_parts
    from verl_fuse.spec.layout import Layout
    from verl_fuse_pipeline.megatron.view import View

    checkpoint = whole(folder)
    found: dict[str, Any] = {}
    with _without_accelerator():
        with View("trained").active():
            trained = engine(world, folder, Layout(tp=2, dp=2, ep=2), checkpoint)
            left: list[Any] = [None] * world.size
            dist.all_gather_object(left, list(own_parts(trained)))
            shards = [shard for of in left for shard in of]
        for layout in (Layout(tp=2, dp=2), Layout(dp=4), Layout(tp=2, pp=2), Layout(pp=2, dp=2, ep=2)):
            with View(str(layout)).active():
                copy, meant = (engine(world, folder, layout, content) for content in (None, checkpoint))
                for block in copy.module[0].decoder.layers:
                    # As in a model in bfloat16 before its first pass.
                    block.mlp.router.expert_bias.data = block.mlp.router.expert_bias.data.bfloat16()
                parts = list(held_parts(copy))
                names = {part.name for part in parts}
                fill(parts, [shard for shard in shards if shard.name in names])
                pairs = zip(copy.module[0].named_parameters(), meant.module[0].parameters(), strict=True)
                different = [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)]
                biased = [torch.equal(b.mlp.router.expert_bias, _bias(b)) for b in copy.module[0].decoder.layers]
                found[str(layout)] = different, len(parts), all(biased)
    biases = sum(shard.data.numel() for shard in shards if shard.name.endswith("expert_bias of 4"))
    left = sum(shard.data.numel() for shard in shards) - biases
    found["left"] = left, sum(t.numel() for t in checkpoint.values()), biases
    return found
