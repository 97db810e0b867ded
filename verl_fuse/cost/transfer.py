"""Computes the seconds to move a model's weights from one placement to another.

Every device needs its shard; weights that it holds already stay, weights that a device of its node holds come over the
node's links, the rest over the network. A piece wanted by several nodes is sent once to each, spread over all devices
that hold it. The slowest sender or receiver decides. Source of the idea: ReaL (arXiv 2406.14088), section on parameter
reallocation; here pieces are counted in fractions, not intervals: shards of FSDP as if they cut the model as tensor
ranks do.

Compiled, because a planner asks for tens of thousands of pairs.
"""

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.cost.model import Placement
from verl_fuse.cost.shard import BYTES
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.layout import Layout, stage_layers
from verl_fuse.spec.model import Model


def transfer_seconds(
    model: Model, source: Placement, target: Placement, cluster: Cluster, network: float, latency: float
) -> float:
    """Return the seconds of a transfer; `network` is the reached fraction of link bandwidth, `latency` the seconds of
    one broadcast step."""
    if source == target:
        return 0.0
    (have, have_layout), (want, want_layout) = source, target
    near, far, sent = _busiest(
        have.first,
        have_layout.holders,
        _copies(have_layout),
        _bounds(model.layers, have_layout.pp),
        want.first,
        want_layout.holders,
        _copies(want_layout),
        _bounds(model.layers, want_layout.pp),
        cluster.devices_per_node,
        cluster.inter_bandwidth / cluster.intra_bandwidth,
    )
    receive = near / cluster.intra_bandwidth + far / cluster.inter_bandwidth
    send = sent / cluster.inter_bandwidth
    if receive == 0.0 and send == 0.0:
        return 0.0
    return BYTES * model.parameters * max(receive, send) / network + latency * have_layout.pp * have_layout.holders


def _copies(layout: Layout) -> int:
    """Return the number of times that a layout holds the model."""
    return layout.tp * layout.dp * layout.cp // layout.holders


@lru_cache(maxsize=4096)
def _bounds(layers: int, pp: int) -> NDArray[np.float64]:
    """Return the place where each stage begins and the last stage ends, as fractions of the blocks."""
    return np.concatenate([[0], np.cumsum(stage_layers(layers, pp))]) / layers


@njit(cache=True)
def _busiest(
    have_first: int,
    have_tp: int,
    have_copies: int,
    have_bounds: NDArray[np.float64],
    want_first: int,
    want_tp: int,
    want_copies: int,
    want_bounds: NDArray[np.float64],
    per_node: int,
    slowness: float,
) -> tuple[float, float, float]:
    """Return shares of the model: the shares that the slowest receiver gets from its node and from other nodes, and the
    share that the busiest sender sends to other nodes.

    Ranks count tensor ranks, then copies, then stages; `slowness` is the network's bandwidth over that within a node.
    """
    have_stages, want_stages = have_bounds.size - 1, want_bounds.size - 1
    sent = np.zeros((have_stages, have_tp))
    slowest = slowest_near = slowest_far = 0.0
    # The first source stage that shares layers with the current target stage.
    overlapping = 0
    for device in range(want_first, want_first + want_stages * want_copies * want_tp):
        index = device - want_first
        rank, copy, stage = index % want_tp, index // want_tp % want_copies, index // (want_tp * want_copies)
        node = device // per_node
        held = device - have_first
        near = far = 0.0
        if rank == 0 and copy == 0:
            while have_bounds[overlapping + 1] <= want_bounds[stage]:
                overlapping += 1
        for a in range(overlapping, have_stages):
            layers = min(have_bounds[a + 1], want_bounds[stage + 1]) - max(have_bounds[a], want_bounds[stage])
            if layers <= 0.0:
                break
            for r in range(rank * have_tp // want_tp, ((rank + 1) * have_tp - 1) // want_tp + 1):
                part = min((r + 1) / have_tp, (rank + 1) / want_tp) - max(r / have_tp, rank / want_tp)
                if held >= 0 and held // (have_tp * have_copies) == a and held % have_tp == r:
                    continue
                start = have_first + a * have_tp * have_copies + r
                nearest = max(0, -((start - node * per_node) // have_tp))
                if nearest < have_copies and start + nearest * have_tp < (node + 1) * per_node:
                    near += layers * part
                else:
                    far += layers * part
                    if copy == 0 or (device - want_tp) // per_node != node:
                        sent[a, r] += layers * part / have_copies
        seconds = near * slowness + far
        if seconds > slowest:
            slowest, slowest_near, slowest_far = seconds, near, far
    return slowest_near, slowest_far, sent.max()
