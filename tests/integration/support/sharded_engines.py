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


def shape(worker: Any) -> dict[str, Any]:
    """How an engine is built, apart from numbers: classes, hooks, keys of state dicts, placements, what
    FSDP2 does with each module."""
    from verl_fuse.host.weights.layouts.unwrap import state_of, wrapped

    module = worker.engine.module
    state = module.state_dict()
    return {
        "classes": [type(part).__name__ for part in module.modules()],
        "hooks": [
            {key: len(hooks) for key, hooks in vars(part).items() if key.endswith("_hooks")}
            for part in module.modules()
        ],
        "state": {name: (tuple(t.shape), str(t.dtype), str(t.placements)) for name, t in state.items()},
        "same": [state["lm_head.weight"] is state["model.embed_tokens.weight"]] if "lm_head.weight" in state else [],
        "mesh": (tuple(worker.engine.device_mesh.mesh.shape), worker.engine.device_mesh.mesh_dim_names),
        "policies": [
            (
                str(kept._mp_policy),
                (g := kept._fsdp_param_group) and (str(g.offload_policy), g.post_forward_mesh_info is None),
            )
            for kept in map(state_of, wrapped(module))
        ],
        "config": str(worker.engine.engine_config),
    }


def layout(world: World, worker: Any, name: str, timeout: float = 60.0) -> Any:
    """The worker's layout, with a store of its own."""
    import torch.distributed as dist

    from verl_fuse.host.weights.layouts.change import EngineLayout
    from verl_fuse.runtime.reshard.options import TransferOptions

    store = dist.PrefixStore(f"{name}", world.store)
    return EngineLayout(worker.engine, name, store=store, node="node", options=TransferOptions(timeout, True))


def moved_about(world: World, folder: Path, name: str) -> dict[str, Any]:
    """From four shards over copies of two to four copies, and back; two steps of training before, none in between."""

    one = worker(world, folder, name)
    changing = layout(world, one, f"{name} about")
    shapes = [
        (parameter.shape[0], parameter.numel() // parameter.shape[0]) for parameter in one.engine.module.parameters()
    ]
    found: dict[str, Any] = {"shapes": shapes, "untrained": changing.change(2, 0).received_bytes}
    changing.change(-1, 0)
    for step in range(2):
        trained(one, name, step)
    before, mine, rates = wholes(one), shards(one), one.engine.lr_scheduler.state_dict()
    optimizer, scheduler = one.engine.optimizer, one.engine.lr_scheduler
    found["tensors"] = len(before)
    found["changes"], built = [], {}
    for fsdp_size in (2, 1, 2, -1):
        moved = changing.change(fsdp_size, 2)
        if fsdp_size not in built:
            built[fsdp_size] = shape(worker(world, folder, name, fsdp_size))
        unlike = [key for key, value in built[fsdp_size].items() if shape(one)[key] != value]
        found["changes"].append((moved.received_bytes, same(before, wholes(one)), unlike))
    found["again"] = changing.change(-1, 2).received_bytes
    found["identity"] = same(mine, shards(one))
    found["kept"] = (
        one.engine.optimizer is optimizer
        and scheduler.optimizer is optimizer
        and scheduler.state_dict() == rates
        and [len(group["params"]) for group in optimizer.param_groups] == [len(list(one.engine.module.parameters()))]
    )
    return found


def switched(world: World, folder: Path, name: str) -> dict[str, Any]:
    """Four steps in four shards, and the same from the third step on in two copies of two: through the class that Ray
    workers have, with a checkpoint after the third step, which a worker in four shards loads again."""
    import torch
    from ray import cloudpickle
    from verl.workers.engine_workers import TrainingWorker

    from verl_fuse.host.weights.layouts import worker as module
    from verl_fuse.runtime.reshard.options import TransferOptions

    stock = worker(world, folder, name)
    numbers = [trained(stock, name, step) for step in range(4)]
    whole = wholes(stock)
    # Inside one worker class both models are what verl calls a critic: their own engine.
    kind = cloudpickle.loads(
        cloudpickle.dumps(module.layout_worker_class("critic", TrainingWorker, TransferOptions(60.0, True)))
    )
    layouts = {}

    def built() -> Any:
        one = worker(world, folder, name, kind=kind)
        one._verl_fuse_layout = layouts[one] = layout(world, one, f"{name} {len(layouts)}")
        return one

    # A folder of each rank alone, as where every node has a disk of its own.
    checkpoint = str(folder / f"{name} checkpoint of rank {world.rank}")
    ours, found = built(), []
    for step in range(4):
        if step == 2:
            draw = torch.get_rng_state()
            layouts[ours].change(2, 2)
            unmoved = torch.equal(draw, torch.get_rng_state())
        found.append(trained(ours, name, step))
        if step == 2:
            ours.save_checkpoint(checkpoint, global_step=3)
    late = built()
    late.load_checkpoint(checkpoint)
    resumed = trained(late, name, 3)
    return {
        "before": found[:2] == numbers[:2],
        "numbers": (numbers[2:], found[2:]),
        "difference": max(float((whole[key] - value).abs().max()) for key, value in wholes(ours).items()),
        "random": unmoved,
        "resumed": (resumed == found[3], same(wholes(late), wholes(ours)), layouts[late].fsdp_size),
    }


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

    from verl_fuse.host.weights.layouts.resized import resized_worker_class

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


def refused(world: World, folder: Path) -> list[str]:
    """What a change says of an engine it cannot change, of ranks with different weights, and of a rank that fails;
    all before it is of use."""
    import torch

    from verl_fuse.errors import FuseError
    from verl_fuse.host.weights.layouts.unwrap import state_of

    said = []
    for fault in ("torch", "optimizer", "version", "failure"):
        one = worker(world, folder, "critic")
        trained(one, "critic", 0)
        changing = layout(world, one, f"refused {fault}", timeout=10.0)
        state = next(iter(one.engine.optimizer.state.values()))
        shard = state_of(one.engine.module)
        if fault == "torch":
            handle = shard.__dict__.pop("_post_forward_hook_handle")
        elif fault == "optimizer":
            state["row"] = torch.zeros(3)
        elif fault == "failure" and world.rank == 1:
            one.engine.engine_config = None
        try:
            changing.change(1, world.rank // 3 if fault == "version" else 1)
        except (FuseError, AttributeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if fault == "torch":
            shard._post_forward_hook_handle = handle
        elif fault == "optimizer":
            del state["row"]
        if fault in ("torch", "optimizer"):
            said.append(str(changing.change(1, 1).received_bytes > 0))
    return said
