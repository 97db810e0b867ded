"""Describes as a number how two legal meshes lie to each other.

All nodes are alike, and all devices of a node; so this number and two layouts decide the cost of moving weights between
the meshes.

Invariants (tests/unit/plan/test_relation.py):
- two pairs of legal meshes of the same sizes and the same relation take the same time to move weights between;
- `0 <= relation(...) < relations(...)`.
"""

from numba import njit

from verl_fuse.plan.tables import Scalar


@njit(cache=True, inline="always")
def relation(first: Scalar, end: Scalar, other_first: Scalar, other_end: Scalar, node: int) -> Scalar:
    """Return 0 for meshes on different nodes; 1 for meshes beside each other in a node; from 2 on for overlapping
    meshes, by their offset. `node`: devices per node."""
    if end <= other_first or other_end <= first:
        return int(min(first, other_first) // node == (max(end, other_end) - 1) // node)
    size, other = end - first, other_end - other_first
    return 1 + (other_first - first + other) // min(size, other, node)


def relations(size: int, other: int, node: int) -> int:
    """Return the number of relations that two meshes of these sizes have."""
    return 1 + (size + other) // min(size, other, node)
