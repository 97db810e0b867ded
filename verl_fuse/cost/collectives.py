"""Computes seconds of collectives over groups of devices, by the ring formulas. Sizes are bytes, each rank's full
buffer.

A group of `size` ranks `stride` devices apart stays within a node if size * stride <= devices per node. Otherwise its
ranks on a node share the bytes that cross to other nodes: a ring passes every node once, and each of them has a network
adapter.
"""

from dataclasses import dataclass

from verl_fuse.cost.calibration import Efficiency
from verl_fuse.cost.model import Numbers
from verl_fuse.spec.cluster import Cluster


@dataclass(frozen=True)
class DeviceGroup:
    """`size` ranks, neighbours `stride` devices apart."""

    size: int
    stride: int


@dataclass(frozen=True)
class Network:
    """The links of a cluster at the speed they reach, and the seconds that a collective takes at least, and `remote`
    ones more where it goes between nodes."""

    cluster: Cluster
    efficiency: Efficiency
    latency: float
    remote: float = 0.0

    def least(self, group: DeviceGroup) -> float:
        """Return the seconds that a collective of the group takes at least."""
        return self.latency + (0.0 if self._is_within_node(group) else self.remote)

    def _is_within_node(self, group: DeviceGroup) -> bool:
        return group.size * group.stride <= self.cluster.devices_per_node

    def bandwidth(self, group: DeviceGroup) -> float:
        """Return the bytes per second of one rank."""
        cluster = self.cluster
        if self._is_within_node(group):
            return cluster.intra_bandwidth * self.efficiency.network
        adapters = max(1, cluster.devices_per_node // group.stride)
        return min(cluster.intra_bandwidth, adapters * cluster.inter_bandwidth) * self.efficiency.network

    def gather(self, group: DeviceGroup, size: Numbers) -> Numbers:
        """Return the seconds of an all-gather or reduce-scatter of a buffer that is `size` bytes when whole."""
        if group.size == 1:
            return 0.0 * size
        return self.least(group) + size * (group.size - 1) / group.size / self.bandwidth(group)

    def reduce(self, group: DeviceGroup, size: Numbers) -> Numbers:
        """Return the seconds of an all-reduce: a reduce-scatter and an all-gather in one call."""
        return self.gather(group, 2 * size)

    def exchange(self, group: DeviceGroup, size: Numbers) -> Numbers:
        """Return the seconds of an all-to-all of `size` bytes per rank. Nothing is shared: bytes for other nodes pass
        the rank's own adapter."""
        near = min(group.size, max(1, self.cluster.devices_per_node // group.stride))
        inside = (near - 1) / group.size / self.cluster.intra_bandwidth
        outside = (group.size - near) / group.size / self.cluster.inter_bandwidth
        return (self.least(group) if group.size > 1 else 0.0) + size * max(inside, outside) / self.efficiency.network

    def send(self, stride: int, size: Numbers) -> Numbers:
        """Point to point to the rank `stride` devices further on."""
        pair = DeviceGroup(2, stride)
        return self.least(pair) + size / self.bandwidth(pair)
