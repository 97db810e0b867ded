"""A small Megatron GPT in parallel-state views, on CPU processes; every weight depends on its name in the
whole model and a seed alone."""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from verl_fuse.runtime.stage import TensorSpec

LAYERS, HIDDEN, VOCABULARY, LENGTH, SAMPLES = 4, 16, 32, 6, 2
MESSAGE = TensorSpec((LENGTH, SAMPLES, HIDDEN), torch.float32)


@cache
def open_view(name: str, mirrored: bool, tp: int, pp: int) -> Any:
    """A view whose parallel state is initialised, on all ranks; the same one when asked again, as
    its groups cost threads."""
    from megatron.core import parallel_state

    from verl_fuse_pipeline.megatron.view import View

    view = View(name, mirrored)
    with view.active():
        parallel_state.initialize_model_parallel(tp, pp)
    view.self_test()
    return view


def gpt(view: Any, seed: int) -> torch.nn.Module:
    """This rank's stage of the model."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    # All that the model needs to run without an accelerator: a device for its buffers, and no CUDA random numbers.
    torch.cuda.current_device = lambda: "cpu"
    initialize_rng_tracker(inference_rng_tracker=True)
    with view.active():
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=ps.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=ps.get_pipeline_model_parallel_world_size(),
            pipeline_dtype=torch.float32,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            batch_p2p_comm=False,
            deallocate_pipeline_outputs=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute",
        )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                draw = torch.Generator().manual_seed(zlib.crc32(whole_name(view, name).encode()) + seed)
                weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    return model


def whole_name(view: Any, name: str) -> str:
    """The name a stage's weight has in the whole model."""
    from megatron.core import parallel_state as ps

    with view.active():
        stages, stage = ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()
    first = stage * LAYERS // stages
    return re.sub(r"(?<=layers\.)\d+", lambda match: str(int(match[0]) + first), name)


def losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return losses per token on the last stage, the tensor handed on elsewhere."""
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return model(tokens, torch.arange(LENGTH).expand(SAMPLES, LENGTH), mask, labels=tokens)


def tokens(pipeline: int, microbatch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * pipeline + microbatch)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=draw)


class OnCpu:
    """The `torch` that Megatron's schedules see: the device that they name for their token counter becomes the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, device: str, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def replica(view: Any, seed: int, **options: bool) -> torch.nn.Module:
    """Return a stage in verl's wrapping (verl.utils.megatron_utils.register_megatron_training_hooks)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
    model: Any = gpt(view, seed)
    with view.active():
        wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        model.config.no_sync_func, model.config.grad_sync_func = wrapped.no_sync, wrapped.start_grad_sync
    return wrapped


def step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    def reduced(output: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = output.mean()
        return loss, loss.item()

    return losses(model, next(data)), reduced


def forward_backward(view: Any, model: torch.nn.Module, step: Callable[..., Any], data: Sequence[Any]) -> list[Any]:
    """Megatron's own 1F1B; returns the losses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    schedules.torch = OnCpu()
    with view.active():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(data),
            model=[model],
            num_microbatches=len(data),
            seq_length=LENGTH,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
