"""Runs a pipeline stage over a plain autograd function: one stage, one tensor in, one tensor out.

Invariants (tests/unit/runtime/test_autograd.py):
- gradients add up in the parameters' `.grad`, in the order of the backwards;
- after a forward the stage's result is not kept unless autograd needs it, after a backward no tensor of the micro-batch
is kept.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from verl_fuse.runtime.stage import TensorSpec

StageFunction = Callable[[int, torch.Tensor | None], torch.Tensor]
"""(micro-batch, what the stage before sent) -> this stage's result, or on the last stage the loss, a scalar."""


class AutogradStage:
    """A stage without gradient synchronisation; `losses` holds the last stage's losses by micro-batch."""

    def __init__(
        self,
        stage: StageFunction,
        parameters: Sequence[torch.Tensor],
        messages: Sequence[TensorSpec] | None,
        results: Sequence[TensorSpec] | None,
    ) -> None:
        """Take specs by micro-batch; `messages` is None on the first stage, `results` on the last."""
        self.device = parameters[0].device
        self.losses: dict[int, torch.Tensor] = {}
        self._stage = stage
        self._parameters = parameters
        self._messages = messages
        self._results = results
        self._saved: dict[int, tuple[torch.Tensor | None, GradientEdge]] = {}

    def message(self, microbatch: int) -> TensorSpec:
        assert self._messages is not None, "the first stage receives nothing"
        return self._messages[microbatch]

    def result(self, microbatch: int) -> TensorSpec:
        assert self._results is not None, "the last stage sends nothing"
        return self._results[microbatch]

    def weights(self) -> Iterable[torch.Tensor]:
        return self._parameters

    def begin(self) -> None: ...

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        if received is not None:
            received.requires_grad_()
        result = self._stage(microbatch, received)
        self._saved[microbatch] = received, get_gradient_edge(result)
        if self._results is not None:
            return result.detach()
        self.losses[microbatch] = result.detach()
        return None

    def before_last_backward(self) -> None: ...

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        entered, edge = self._saved.pop(microbatch)
        torch.autograd.backward(edge, received)
        return None if entered is None else entered.grad

    def end(self) -> None: ...
