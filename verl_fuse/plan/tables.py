"""Defines the flat tables that the compiled kernels read."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# An element of an array: a plain number to the compiler, which a type checker cannot tell.
Scalar = Any


class PlanTables(NamedTuple):
    """The arrays that the kernels read; n calls, k options over all calls. Device numbers are int64, seconds and bytes
    float64."""

    begin: NDArray[np.int64]  # n + 1
    first: NDArray[np.int64]  # k, first device of the mesh
    end: NDArray[np.int64]  # k, one past the last device
    seconds: NDArray[np.float64]  # k
    resident: NDArray[np.float64]  # k
    active: NDArray[np.float64]  # k
    copy: NDArray[np.float64]  # k
    placement: NDArray[np.int64]  # k, equal within a role = same mesh and layout, weights on the devices
    shape: NDArray[np.int64]  # k, equal within a role = same layout, on whatever mesh
    base: NDArray[np.int64]  # shapes x shapes, where the moves between two shapes begin in `moves`
    moves: NDArray[np.float64]  # seconds, one per relation of the meshes (verl_fuse/plan/relation.py)
    before: NDArray[np.bool_]  # n x n, [a, b]: a ends before b starts
    source: NDArray[np.int64]  # n, the train call whose weights this call uses; -1: its own
    devices: int
    node: int
    limit: float
    deferred: int  # the train call that the next step does not wait for, until a call uses its weights; -1: none
