"""Ring formulas, and which link a group uses."""

import pytest

from verl_fuse.cost.calibration import A100, Efficiency
from verl_fuse.cost.collectives import DeviceGroup, Network
from verl_fuse.spec.cluster import cluster_named

CLUSTER = cluster_named("A100-80G", nodes=4)
FULL = Network(CLUSTER, Efficiency(1.0, 1.0, 1.0, 1.0), 0.0)


@pytest.mark.parametrize(
    ("group", "bandwidth"),
    [
        (DeviceGroup(8, 1), 300e9),
        (DeviceGroup(2, 4), 300e9),
        # Eight adapters a node together, but no more than the links inside.
        (DeviceGroup(32, 1), 200e9),
        (DeviceGroup(8, 4), 50e9),
        (DeviceGroup(4, 8), 25e9),
        (DeviceGroup(2, 16), 25e9),
    ],
)
def test_the_slowest_link_of_a_group_decides(group: DeviceGroup, bandwidth: float):
    assert FULL.bandwidth(group) == bandwidth


def test_ring_formulas():
    group = DeviceGroup(8, 1)
    assert FULL.gather(group, 300e9) == pytest.approx(7 / 8)
    assert FULL.reduce(group, 300e9) == pytest.approx(14 / 8)
    assert FULL.exchange(group, 300e9) == pytest.approx(7 / 8)
    # Of 32 ranks, 24 are on other nodes, each behind the rank's one adapter.
    assert FULL.exchange(DeviceGroup(32, 1), 25e9) == pytest.approx(24 / 32)
    assert FULL.exchange(DeviceGroup(4, 8), 25e9) == pytest.approx(3 / 4)
    assert FULL.send(8, 25e9) == pytest.approx(1.0)


def test_a_rank_alone_sends_nothing():
    network = Network(CLUSTER, A100, 1e-3)
    assert network.gather(DeviceGroup(1, 1), 1e9) == network.reduce(DeviceGroup(1, 1), 1e9) == 0.0
    assert network.reduce(DeviceGroup(2, 1), 0.0) == 1e-3


def test_a_collective_between_nodes_takes_longer():
    network = Network(CLUSTER, A100, 1e-3, 1e-2)
    assert network.gather(DeviceGroup(CLUSTER.devices_per_node, 1), 0) == pytest.approx(1e-3)
    assert network.gather(DeviceGroup(2 * CLUSTER.devices_per_node, 1), 0) == pytest.approx(1.1e-2)
    assert network.send(CLUSTER.devices_per_node, 0) == pytest.approx(1.1e-2)
