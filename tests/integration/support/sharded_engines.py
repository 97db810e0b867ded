"""An actor and a critic in verl's own TrainingWorkers on FSDP1 or FSDP2, gloo processes, fixed batches: their layout
changed while they are trained.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
from ranks import World
from small_engines import Model, share

RANKS = 4
MODELS = ("actor", "critic")
SIZES = Model(mini_batches=2)


def write_models(folder: Path) -> None:
    """Tied embeddings and biases in the actor, a head of its own in the critic; a vocabulary that four
    ranks cannot divide evenly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 66,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "actor")
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).save_pretrained(folder / "critic")


def worker(
    world: World,
    folder: Path,
    name: str,
    fsdp_size: int = -1,
    kind: Any = None,
    reshard_after_forward: bool = True,
    activation_offload: bool = False,
    lora_rank: int = 0,
    param_dtype: str = "fp32",
    strategy: str = "fsdp2",
    use_orig_params: bool = False,
    gradient_checkpointing: bool = True,
    sequence_ranks: int = 1,
) -> Any:
    """verl's TrainingWorker of one model, or a subclass of it, initialised; `sequence_ranks` share a row."""
    import types

    import torch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    model_config = HFModelConfig(
        path=str(folder / name),
        load_tokenizer=False,
        use_remove_padding=sequence_ranks > 1,
        enable_gradient_checkpointing=gradient_checkpointing,
        enable_activation_offload=activation_offload,
        lora_rank=lora_rank,
        override_config={"attn_implementation": "eager"},
    )
    model_config.tokenizer = types.SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)
    precision = {"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        use_orig_params=use_orig_params,
        fsdp_size=fsdp_size,
        reshard_after_forward=reshard_after_forward,
        ulysses_sequence_parallel_size=sequence_ranks,
        mixed_precision=precision,
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
    )
    built = (kind or TrainingWorker)(
        TrainingWorkerConfig(
            model_type="value_model" if name == "critic" else "language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(
                lr=1e-2, total_training_steps=10, lr_scheduler_type="cosine", clip_grad=1.0
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    built.flops_counter = None
    # The value head is new.
    torch.manual_seed(0)
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        built.reset()
    if name == "critic":
        config: Any = types.SimpleNamespace(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None)
        built.set_loss_fn(partial(value_loss, config=config))
    else:
        config = FSDPActorConfig(
            rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False, strategy=strategy
        )
        built.set_loss_fn(partial(ppo_loss, config=config))
    return built


def trained(worker: Any, name: str, step: int) -> dict[str, float]:
    """Train a step; what verl reports of it, without times and memory."""
    import torch
    from verl.utils import tensordict_utils as tu

    data = share(name, SIZES, step, worker)
    lengths = data["input_ids"].offsets().diff().tolist()
    data["position_ids"] = torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return {key: value for key, value in metrics.items() if not key.startswith("perf/")}


def shards(worker: Any) -> dict[str, Any]:
    """Return the state that this rank holds: copies of its part of parameters and of the optimizer's state, by name."""
    engine = worker.engine
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {name: parameter for name, parameter in engine.module.named_parameters()}
    for parameter, state in engine.optimizer.state.items():
        found |= {f"{names[id(parameter)]} {key}": value for key, value in state.items()}
    return {name: getattr(tensor, "_local_tensor", tensor).detach().clone() for name, tensor in found.items()}


def wholes(worker: Any) -> dict[str, Any]:
    """The same, every tensor whole."""
    from torch.distributed.tensor import DTensor

    engine = worker.engine
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {name: parameter.detach() for name, parameter in engine.module.named_parameters()}
    for parameter, state in engine.optimizer.state.items():
        found |= {f"{names[id(parameter)]} {key}": value for key, value in state.items()}
    # With one rank a whole tensor is the parameter itself, which learns on.
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both have the same tensors, bitwise."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wrote(world: World, folder: Path, fsdp_size: int) -> dict[str, Any]:
    """Two steps of a critic in shards of that size, and its checkpoint; everything it holds, whole."""
    ours = worker(world, folder, "critic", fsdp_size=fsdp_size)
    for step in range(2):
        trained(ours, "critic", step)
    ours.save_checkpoint(str(folder / f"written by {world.size}x{fsdp_size}"), global_step=2)
    return wholes(ours) | {"rate": ours.engine.lr_scheduler.get_last_lr()}


def went_on(world: World, folder: Path, written: str) -> dict[str, Any]:
    """What the class that Ray workers have loads of a checkpoint, whether it trains, and what is left in the folder."""
    from ray import cloudpickle
    from verl.workers.engine_workers import TrainingWorker

    from verl_fuse_placement.resized import resized_worker_class

    kind = cloudpickle.loads(cloudpickle.dumps(resized_worker_class(TrainingWorker)))
    ours = worker(world, folder, "critic", kind=kind)
    before = sorted(file.name for file in (folder / written).iterdir())
    ours.load_checkpoint(str(folder / written))
    held = wholes(ours) | {"rate": ours.engine.lr_scheduler.get_last_lr()}
    learned = trained(ours, "critic", 2)
    return {
        "held": held,
        "learned": learned,
        "untouched": before == sorted(file.name for file in (folder / written).iterdir()),
    }
