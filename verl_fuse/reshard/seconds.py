"""Predicts the seconds of a program on a cluster.

A rank's links to its own node and to the network are used one message at a time in each direction, so a rank takes as
long as its busier direction, and the slowest rank decides; each message costs a launch on top.
`verl_fuse.cost.transfer` is the planner's quick estimate of the same seconds.
"""

import numpy as np

from verl_fuse.cost.collectives import Network
from verl_fuse.reshard.program import TransferProgram


def predicted_seconds(program: TransferProgram, network: Network) -> float:
    """Return the seconds of a program on a cost model's network."""
    if not len(program.hops):
        return 0.0
    cluster = network.cluster
    near, far = program.load(far=False), program.load(far=True)
    messages = [
        np.bincount(ranks, minlength=len(program.nodes)) for ranks in (program.hops.sender, program.hops.receiver)
    ]
    slowest = 0.0
    for side in (0, 1):
        links = near[side] / cluster.intra_bandwidth + far[side] / cluster.inter_bandwidth
        slowest = max(slowest, float((links / network.efficiency.network + network.latency * messages[side]).max()))
    return slowest
