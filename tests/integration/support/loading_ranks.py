"""Training ranks and the vLLM workers beside them, in one process each: real FSDP2 modules, real vLLM models, gloo."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit/runtime"))
from ranks import World

# Cases by name: a model, how it is sharded in training, vLLM's tensor parallelism and type.
RANKS = 4
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PRELOAD = ["vllm.model_executor.models.llama", "vllm.engine.arg_utils", "verl_fuse_realloc.sync.hybrid"]


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded in training, and vLLM's tensor parallelism and type."""

    family: str
    options: dict
    mesh: tuple[int, ...]
    tp: int
    dtype: str


CASES = {
    # A vocabulary that vLLM pads, biases, a tied head.
    "qwen2, 4 shards, tp 2": Case(
        "Qwen2", {"num_key_value_heads": 2, "vocab_size": 200, "tie_word_embeddings": True}, (4,), 2, "float32"
    ),
    # Fewer key heads than tensor ranks, a head of its own, another type in vLLM.
    "llama, 2 copies of 2 shards, tp 4": Case(
        "Llama", {"num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False}, (2, 2), 4, "bfloat16"
    ),
    "qwen3, 4 shards, tp 1": Case(
        "Qwen3", {"num_key_value_heads": 4, "vocab_size": 99, "head_dim": 8}, (4,), 1, "float32"
    ),
    "mistral, 4 shards, tp 2": Case("Mistral", {"num_key_value_heads": 2, "vocab_size": 96}, (4,), 2, "float32"),
    # One key head for two tensor ranks, heads wider than the hidden size divides into.
    "gemma, 4 shards, tp 2": Case(
        "Gemma", {"num_key_value_heads": 1, "vocab_size": 100, "head_dim": 16}, (4,), 2, "float32"
    ),
    "gemma2, 4 shards, tp 1": Case(
        "Gemma2", {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 16}, (4,), 1, "float32"
    ),
    # Norms within attention and behind it.
    "gemma3, 2 copies of 2 shards, tp 2": Case(
        "Gemma3Text", {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 16}, (2, 2), 2, "bfloat16"
    ),
    # Experts, stacked in training.
    "qwen3_moe, 4 shards, tp 2": Case(
        "Qwen3Moe", {"num_key_value_heads": 2, "vocab_size": 96, **EXPERTS}, (4,), 2, "bfloat16"
    ),
    "qwen2_moe, 4 shards, tp 2": Case(
        "Qwen2Moe",
        {"num_key_value_heads": 2, "vocab_size": 96, "shared_expert_intermediate_size": 64, **EXPERTS},
        (4,),
        2,
        "bfloat16",
    ),
}


def config_of(case: Case) -> Any:
    """Return the configuration of a case's model in transformers' form."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**SMALL, **case.options)
    config.architectures = [f"{case.family.removesuffix('Text')}ForCausalLM"]
    return config


def sharded(case: Case) -> tuple[Any, dict]:
    """As much of an engine as a sync looks at, with the model in shards, and the whole parameters."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    config = config_of(case)
    model = transformers.AutoModelForCausalLM.from_config(config)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("copy", "shard")[-len(case.mesh) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    described = SimpleNamespace(hf_config=config)
    return SimpleNamespace(module=model, model_config=described, is_param_offload_enabled=False), whole


def opened(world: World, name: str, engine: Any, engines: Any, dtype: Any) -> Any:
    """A stream with a store of its own."""
    import torch.distributed as dist

    from verl_fuse_realloc.sync.hybrid import TransferOptions, open_stream

    store = dist.PrefixStore(name, world.store)
    return open_stream(engine, engines, dtype, 1 << 16, store=store, node="node", options=TransferOptions(60.0, True))


def loaded(world: World, name: str, folder: Path) -> dict[str, int | bool]:
    """Load vLLM's model from the sync, and again from the whole parameters; what is to be equal or known of it."""
    case = CASES[name]
    engine, whole = sharded(case)
    path = folder / f"{case.family}-{world.rank}"
    engine.model_config.hf_config.save_pretrained(path)
    return compared(world, name, path, engine, whole, case.tp, case.dtype)


def compared(
    world: World, name: str, path: Path, engine: Any, whole: dict[str, Any], tp: int, dtype: str
) -> dict[str, int | bool]:
    """As `loaded`, of an engine and the whole parameters of its model; `path` has the model's configuration."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from verl_fuse.reshard.vllm import VllmSharding
    from verl_fuse_realloc.sync.trained import own_shards

    # Where names differ, vLLM talks through gloo instead of shared memory.
    os.environ["VLLM_DIST_IDENT"] = f"rank {world.rank}"
    arguments = EngineArgs(
        model=str(path),
        dtype=dtype,
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="external_launcher",
        max_model_len=32,
    )
    stream = opened(world, name, engine, VllmSharding(tp, RANKS // tp), getattr(torch, dtype))
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, world.rank, "env://", world.rank, "gloo")
        initialize_model_parallel(tp)
        torch.set_default_dtype(getattr(torch, dtype))
        model: Any = initialize_model(config)
        torch.set_default_dtype(torch.float32)
        _forget(model)
        # In two parts, as verl's buckets come.
        arriving = iter(stream.run(own_shards(engine), 5))
        model.load_weights([next(arriving) for _ in range(4)])
        unfinished = stream.held_version.version
        model.load_weights(arriving)
        ours = {name: parameter.clone() for name, parameter in model.named_parameters()}
        _forget(model)
        model.load_weights(whole.items())
        theirs = dict(model.named_parameters())
        destroy_model_parallel()
    return {
        "tensors": len(ours),
        "different": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
        "finite": all(bool(parameter.isfinite().all()) for parameter in ours.values()),
        "versions": (unfinished, stream.held_version.version),
        "received": sum(report.received_bytes for report in stream.reports),
        "extra": max(report.extra_bytes for report in stream.reports),
    }


def _forget(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))


def refused(world: World) -> list[str]:
    """Return the errors of a sync about unknown models and shardings."""
    import torch
    import transformers

    from verl_fuse.errors import FuseError
    from verl_fuse.reshard.vllm import VllmSharding

    said = []
    for change in ("type", "name", "sharding", "ranks"):
        engine, _ = sharded(CASES["qwen3, 4 shards, tp 1"])
        if change == "type":
            engine.model_config.hf_config.model_type = "gpt2"
        elif change == "name":
            engine.module.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
        elif change == "sharding":
            engine.module = transformers.AutoModelForCausalLM.from_config(engine.model_config.hf_config)
        try:
            opened(world, change, engine, VllmSharding(1, 3 if change == "ranks" else 4), torch.float32)
        except FuseError as error:
            said.append(str(error))
    return said
