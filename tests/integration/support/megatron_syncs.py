"""Real Megatron engines of verl and the vLLM workers that get their weights, on gloo.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
from loading_ranks import RANKS, SMALL, compared, opened
from ranks import World
from separate_ranks import CONFIG, TRAINERS
from small_engines import Case, Model, offloading, storages, worker


@dataclass(frozen=True)
class Sync:
    """A model, its parallelism in training, how its vocabulary is padded there, and vLLM's tensor parallelism."""

    family: str
    options: dict
    model: Model
    tp: int
    padded_to: int | None = None
    offload: bool = False


SYNCS = {
    # Two queries to a key; a head of its own.
    "llama, tp2 pp2, vllm tp 1": Sync(
        "Llama", {"num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False}, Model(2, 2), 1
    ),
    # Biases, a tied head on two stages, two copies.
    "qwen2, pp2 dp2, vllm tp 2": Sync(
        "Qwen2", {"num_key_value_heads": 2, "vocab_size": 200, "tie_word_embeddings": True}, Model(1, 2), 2
    ),
    # Norms of queries and keys, a vocabulary that Megatron pads to 128 rows.
    "qwen3, tp2 dp2, vllm tp 2": Sync(
        "Qwen3",
        {"num_key_value_heads": 4, "vocab_size": 99, "head_dim": 8, "tie_word_embeddings": False},
        Model(2, 1),
        2,
        padded_to=64,
        offload=True,
    ),
}
# Of the training ranks of separate_ranks, and their model.
SEPARATE = {
    "tp2": Sync("Qwen2", CONFIG, Model(2, 1), 1, padded_to=64),
    "pp2": Sync("Qwen2", CONFIG, Model(1, 2), 2),
}


def write(folder: Path, sync: Sync) -> None:
    """The random model of a case, as a Hugging Face checkpoint."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{sync.family}Config")(**SMALL | sync.options, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def whole(folder: Path) -> dict[str, Any]:
    """Return the parameters that verl's engine trains, which have 16 bits."""
    import torch
    from safetensors.torch import load_file

    return {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}


def engine(world: World, folder: Path, sync: Sync) -> Any:
    """verl's own actor engine, with the checkpoint loaded."""
    import torch
    from verl.models.mcore.mbridge import AutoBridge

    with (
        pytest.MonkeyPatch.context() as patch,
        open(os.devnull, "w") as silence,
        redirect_stdout(silence),
        offloading() if sync.offload else nullcontext(),
    ):
        # verl gives mbridge no padding; its other bridge pads by itself.
        padded = partial(AutoBridge.from_config, make_vocab_size_divisible_by=sync.padded_to)
        patch.setattr(AutoBridge, "from_config", padded)
        # Megatron moves the second copy of a tied head to an accelerator.
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        # verl offloads the flat buffers that come with this optimizer.
        case = Case(actor=sync.model, distributed_optimizer=sync.offload, offload=sync.offload)
        built = worker(world, folder, case, "actor").engine
        assert not sync.offload or storages(built) == {0}
        return built


def loaded(world: World, name: str, folder: Path) -> dict[str, int | bool]:
    """vLLM's model from the sync against the one from the whole checkpoint; what is to be equal or known of it."""
    sync = SYNCS[name]
    return compared(world, name, folder, engine(world, folder, sync), whole(folder), sync.tp, "bfloat16")


def refused(world: World, folder: Path) -> list[str]:
    """Return the error of a sync about an unknown engine."""
    import torch

    from verl_fuse.errors import FuseError
    from verl_fuse.reshard.vllm import VllmSharding

    trained = engine(world, folder, SYNCS["llama, tp2 pp2, vllm tp 1"])
    (chunk,) = trained.module
    model: Any = chunk.module.module
    said = []

    def ask(change: str) -> None:
        try:
            opened(world, change, trained, VllmSharding(1, RANKS), torch.bfloat16)
        except FuseError as error:
            said.append(str(error))

    trained.module = [chunk, chunk]
    ask("virtual pipeline")
    trained.module = [chunk]
    for key, value in (("fp8", "hybrid"), ("pipeline_model_parallel_layout", "Et|tL")):
        setattr(model.config, key, value)
        ask(key)
        setattr(model.config, key, None)
    own = model.pg_collection.cp
    model.pg_collection.cp = model.pg_collection.tp
    ask("context parallelism")
    model.pg_collection.cp = own
    norm = model.decoder.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(torch.zeros(31))
    ask("shape")
    norm.weight = torch.nn.Parameter(torch.zeros(32))
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    ask("name")
    return said


def separate_engine(world: World, name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """An engine of the first `TRAINERS` ranks, which have a process group without the others, as in verl; the
    whole checkpoint on all."""
    import torch.distributed as dist

    dist.destroy_process_group()
    if world.rank >= TRAINERS:
        return None, whole(folder)
    trainers = World(world.rank, TRAINERS, world.store)
    store = dist.PrefixStore("trainers", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=TRAINERS)
    return engine(trainers, folder, SEPARATE[name]), whole(folder)
