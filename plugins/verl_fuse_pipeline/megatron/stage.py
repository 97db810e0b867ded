"""Runs one call of Megatron's `forward_backward_func` through the executor as a stage, step by step with Megatron's own
steps.

What Megatron's schedule does around its steps happens here at the same places: gradients are not synchronised before
the last backward, a result is deallocated when it has been handed on, gradients are finalised at the end, every loss is
divided by this stage's own number of micro-batches. Everything runs in the model's view.

Invariants (tests/integration/test_megatron_stage.py): losses and gradients are bitwise those of Megatron's own 1F1B; a
call that asks for what only Megatron's schedules do is refused before anything runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import megatron.core.parallel_state as parallel_state
import torch
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config, get_model_type

from verl_fuse.errors import FuseError
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse_pipeline.megatron.view import View

# Options of a Megatron model that its own schedules handle and that no stage does, with the value that asks for
# nothing.
UNSUPPORTED = {
    "timers": None,
    "defer_embedding_wgrad_compute": False,
    "fine_grained_activation_offloading": False,
    "num_microbatches_with_partial_activation_checkpoints": None,
}


@dataclass(frozen=True)
class ForwardBackwardCall:
    """The arguments of `forward_backward_func` that matter to a stage; `data` yields the micro-batches in order."""

    step: Callable[..., Any]
    data: Iterator[Any]
    model: Sequence[torch.nn.Module]
    microbatches: int


class MegatronStage:
    """One stage; `specs` are the messages between stages by micro-batch. `results` is the return value that
    `forward_backward_func` would have."""

    def __init__(
        self, view: View, call: ForwardBackwardCall, specs: Sequence[TensorSpec], device: torch.device
    ) -> None:
        self.device = device
        self.results: list[Any] = []
        self._view = view
        self._call = call
        self._specs = specs
        if len(call.model) != 1:
            raise FuseError(f"model {view.name!r} has {len(call.model)} virtual pipeline stages on a rank; 1 can run")
        self._model = call.model[0]
        self._config = get_model_config(self._model)
        for option, nothing in UNSUPPORTED.items():
            if (value := getattr(self._config, option, nothing)) != nothing:
                raise FuseError(
                    f"model {view.name!r}: {option}={value!r} is for Megatron's own schedules; needs {nothing!r}"
                )
        with view.active():
            self._first = parallel_state.is_pipeline_first_stage()
            self._last = parallel_state.is_pipeline_last_stage()
            self._context_ranks = parallel_state.get_context_parallel_world_size()
        self._saved: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        # By which the backward pass scales losses of routers of experts: one number for all models of the process.
        self._loss_scale: torch.Tensor | None = None
        self._tokens = torch.zeros([], dtype=torch.int, device=device)
        self._unsynchronised = ExitStack()

    def message(self, microbatch: int) -> TensorSpec:
        return self._specs[microbatch]

    def result(self, microbatch: int) -> TensorSpec:
        return self._specs[microbatch]

    def weights(self) -> Iterable[torch.Tensor]:
        return self._model.parameters()

    def begin(self) -> None:
        if self._config.no_sync_func is not None:
            self._unsynchronised.enter_context(self._config.no_sync_func())

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        if received is not None:
            received.requires_grad_()
        with self._view.active():
            made, tokens = forward_step(
                self._call.step,
                self._call.data,
                self._model,
                self._call.microbatches,
                received,
                self.results,
                self._config,
                self._context_ranks,
                is_first_microbatch=microbatch == 0,
                current_microbatch=microbatch,
                is_last_stage=self._last,
            )
        assert isinstance(made, torch.Tensor)
        if self._config.num_moe_experts is not None:
            scale: Any = MoEAuxLossAutoScaler.main_loss_backward_scale
            self._loss_scale = scale.clone()
        self._tokens += tokens
        self._saved[microbatch] = received, made
        if self._last:
            return None
        message = made.detach()
        deallocate_output_tensor(made, self._config.deallocate_pipeline_outputs)
        return message

    def before_last_backward(self) -> None:
        # With a `grad_sync_func`, later stages start to synchronise together at the end, so that the first stage is not
        # slowed down.
        if self._config.grad_sync_func is None or self._first:
            self._unsynchronised.close()

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        entered, made = self._saved.pop(microbatch)
        if self._loss_scale is not None:
            MoEAuxLossAutoScaler.set_loss_scale(self._loss_scale)
        with self._view.active():
            gradient: Any = backward_step(entered, made, received, get_model_type(self._model), self._config)
        return gradient

    def end(self) -> None:
        if self._config.grad_sync_func is not None and not self._first:
            self._unsynchronised.close()
            self._config.grad_sync_func(self._model.parameters())
        if self._config.finalize_model_grads_func is not None:
            tokens = self._tokens if self._config.calculate_per_token_loss else None
            with self._view.active():
                self._config.finalize_model_grads_func([self._model], tokens)
