"""Lists the sets of devices that a call may run on.

Invariants (tests/unit/plan/test_meshes.py):
- within a node: aligned slices of a power of two; otherwise whole consecutive nodes (ReaL, arXiv 2406.14088);
- up to `EVERY` nodes every such mesh is legal; on larger clusters the meshes that begin or end with the cluster, or are
  aligned to their size, which leaves every split in two and every aligned half, quarter, ... legal.
"""

from verl_fuse.spec.cluster import Cluster, Mesh

EVERY = 16


def legal_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """Return the legal meshes, small to large, then by position."""
    per_node, nodes = cluster.devices_per_node, cluster.nodes
    sizes = [size for size in (2**i for i in range(per_node.bit_length())) if size < per_node and per_node % size == 0]
    slices = [Mesh(first, size) for size in sizes for first in range(0, cluster.devices, size)]
    wholes = [
        Mesh(first * per_node, count * per_node)
        for count in range(1, nodes + 1)
        for first in range(nodes - count + 1)
        if nodes <= EVERY or first in (0, nodes - count) or (first % count == 0 and count & (count - 1) == 0)
    ]
    return tuple(slices + wholes)
