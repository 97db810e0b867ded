"""The interface of a model for the executor: one stage of one pipeline on this rank, called op by op.

A stage keeps what its backwards need, frees it when the backward is done, and calls its own collectives in `end` only,
so that data dependence between stages is all that blocks a program.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch


class TensorSpec(NamedTuple):
    """Shape and type of a message; every rank computes it locally, so that nothing is exchanged
    before the message itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineStage(Protocol):
    """One stage of one pipeline. Messages are contiguous tensors on `device`; gradients have the spec of
    what they are gradients of."""

    device: torch.device

    def message(self, microbatch: int) -> TensorSpec:
        """The form of the tensor that enters this stage in the forward of a micro-batch; asked on stages after the
        first."""
        ...

    def result(self, microbatch: int) -> TensorSpec:
        """The form of the tensor that leaves this stage in the forward of a micro-batch; asked on stages before the
        last."""
        ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Tensors that autograd keeps for the backward but that are no activations."""
        ...

    def begin(self) -> None:
        """Before the first op: no gradient synchronisation from here on."""
        ...

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run one forward; `received` is None on the first stage, the result on the last (which keeps its loss)."""
        ...

    def before_last_backward(self) -> None:
        """The next backward is the last of this stage: gradient synchronisation may start."""
        ...

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run one backward; returns the gradient of what the forward received. None where `forward` has None."""
        ...

    def end(self) -> None:
        """After the last op of every rank, stage by stage in the problem's order: finalise gradients."""
        ...
