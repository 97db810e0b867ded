"""Measures the memory that activations hold, as autograd sees it.

Invariants (tests/unit/runtime/test_meter.py):
- a storage that autograd keeps for a backward counts once, from its forward until autograd lets go of it;
- weights do not count; a tensor that a stage keeps longer than its backward stays counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class ActivationMeter:
    """A meter of activations that knows the bytes held now (`held`) and the most bytes held so far (`peak`).

    Tensors of nested saved-tensor hooks (recomputation, offload) are not counted here, nor are the parts of a nested
    tensor.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.held = 0
        self.peak = 0
        self._weights = {_address(weight) for weight in weights}
        self._users: Counter[int] = Counter()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the tensors that autograd saves in this block."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        # A tensor made of other tensors (a nested tensor) has no memory of its own.
        if is_traceable_wrapper_subclass(tensor):
            return tensor
        # A storage without memory (a meta or an empty tensor) has no address as its identity, and no bytes to count.
        address = _address(tensor)
        return tensor if address in self._weights or address == 0 else _Saved(tensor, self)

    def add(self, address: int, size: int) -> None:
        self._users[address] += 1
        if self._users[address] == 1:
            self.held += size
            self.peak = max(self.peak, self.held)

    def remove(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0:
            del self._users[address]
            self.held -= size


class _Saved:
    """The object that autograd keeps instead of a tensor; it dies when autograd lets go."""

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter) -> None:
        self.tensor = tensor
        self._counted = _address(tensor), tensor.untyped_storage().nbytes()
        self._meter = meter
        meter.add(*self._counted)

    def __del__(self) -> None:
        self._meter.remove(*self._counted)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
