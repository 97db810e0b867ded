"""Pickles a part of a parameter.

A shard is pickled as an array of bytes, which Ray writes once into the store's shared memory, where every receiver
reads it: torch's own pickles are part of the message, and are copied several times.

Invariants (tests/unit/host/test_shards.py):
- a shard's bytes are copied once on their way into a message, and not at all on their way out; a tensor that was taken
out is only read.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Shard:
    """A part of the parameter `name`: `data`, in host memory where it is pickled, begins at `offset` of the parameter,
    in every dimension.

    A tensor that was taken out of a pickle may only be read."""

    name: str
    offset: tuple[int, ...]
    data: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy has no bfloat16.
        octets = self.data.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _unpickled, (self.name, self.offset, self.data.dtype, tuple(self.data.shape), octets)


def _unpickled(
    name: str, offset: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...], octets: np.ndarray
) -> Shard:
    with warnings.catch_warnings():
        # The store's memory is read-only, and no code writes it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        data = torch.from_numpy(octets)
    return Shard(name, offset, data.view(dtype).view(shape))
