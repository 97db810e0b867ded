"""The bytes that ranks send and receive in a program, and its seconds on a cluster.

A rank's links to its own node and to the network are used one message at a time in each direction, so a rank takes as
long as its busier direction, and the slowest rank decides; each message costs a launch on top.
`verl_fuse.cost.transfer` is the planner's quick estimate of the same seconds.
"""

import numpy as np

from verl_fuse.cost.collectives import Network
from verl_fuse.reshard.program import TransferProgram


def sent(program: TransferProgram, *, far: bool) -> np.ndarray:
    """Return the bytes that each rank sends of elements held before the program, to other nodes or within its own."""
    return _per_rank(program, program.hops.sender, (_far(program) == far) & (program.hops.place == 0))


def load(program: TransferProgram, *, far: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each rank sends and receives in all, between nodes or within its own."""
    chosen = _far(program) == far
    return _per_rank(program, program.hops.sender, chosen), _per_rank(program, program.hops.receiver, chosen)


def _far(program: TransferProgram) -> np.ndarray:
    nodes = np.array(program.nodes, np.int64)
    return nodes[program.hops.sender] != nodes[program.hops.receiver]


def _per_rank(program: TransferProgram, ranks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    sizes = (program.hops.high - program.hops.low)[chosen]
    counted = np.bincount(ranks[chosen], weights=sizes, minlength=len(program.nodes))
    return counted.astype(np.int64) * program.item_bytes


def predicted_seconds(program: TransferProgram, network: Network) -> float:
    """Return the seconds of a program on a cost model's network."""
    if not len(program.hops):
        return 0.0
    cluster = network.cluster
    near, far = load(program, far=False), load(program, far=True)
    messages = [
        np.bincount(ranks, minlength=len(program.nodes)) for ranks in (program.hops.sender, program.hops.receiver)
    ]
    slowest = 0.0
    for side in (0, 1):
        links = near[side] / cluster.intra_bandwidth + far[side] / cluster.inter_bandwidth
        slowest = max(slowest, float((links / network.efficiency.network + network.latency * messages[side]).max()))
    return slowest
