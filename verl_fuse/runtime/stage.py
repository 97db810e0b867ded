"""Defines the interface of a model for the executor: one stage of one pipeline on this rank, called op by op.

A stage keeps the tensors that its backwards need, frees them when the backward is done, and calls its own collectives
in `end` only, so that only data dependence between stages blocks a program.
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
    """One stage of one pipeline. Messages are contiguous tensors on `device`; gradients have the spec of their
    tensors."""

    device: torch.device

    def message(self, microbatch: int) -> TensorSpec:
        """Return the form of the tensor that enters this stage in the forward of a micro-batch; asked on stages after
        the first."""
        ...

    def result(self, microbatch: int) -> TensorSpec:
        """Return the form of the tensor that leaves this stage in the forward of a micro-batch; asked on stages before
        the last."""
        ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Return tensors that autograd keeps for the backward but that are no activations."""
        ...

    def begin(self) -> None:
        """Act before the first op: no gradient synchronisation from here on."""
        ...

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run one forward; `received` is None on the first stage, the result on the last (which keeps its loss)."""
        ...

    def before_last_backward(self) -> None:
        """Act before the last backward of this stage: gradient synchronisation may start."""
        ...

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run one backward; return the gradient of the tensor that the forward received. None where `forward` has
        None."""
        ...

    def end(self) -> None:
        """Finalise gradients after the last op of every rank, stage by stage in the problem's order."""
        ...
