"""Checks once whether every node of the cluster sees the run's folder.

Processes of other nodes read files that a run writes there: parts of a checkpoint, and the files that drafters left; so
does a user who looks at the run.

Invariants (tests/integration/test_two_nodes.py):
- a node that does not find a file just written here is named, and so is a node that does not answer;
- no file of the check stays in the folder; on one node no other node is asked.
"""

import logging
from pathlib import Path
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# A node may take this many seconds to answer, including the start of a process there.
SEEN_SECONDS = 60.0

logger = logging.getLogger(__name__)


def warn_unshared(folder: Path) -> None:
    """Warn of nodes that do not see this node's `folder`, the folder of the run."""
    if missing := nodes_without(folder):
        here = ray.util.get_node_ip_address()
        logger.warning(
            "fuse.run_dir=%s: what node %s writes there is not found on %s. Timelines and accounts are on %s alone, "
            "checkpoints in parts on each node, and drafts are of a node's own samples. Needs a folder that all nodes "
            "share (fuse.run_dir, trainer.default_local_dir)",
            folder,
            here,
            ", ".join(missing),
            here,
        )


def nodes_without(folder: Path) -> list[str]:
    """Return the addresses of the other live nodes that do not see a file in this node's `folder`."""
    own = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    if not others:
        return []
    mark = folder / f".seen-{uuid4().hex}"
    mark.touch()
    try:
        asked = {node["NodeManagerAddress"]: _asked(node["NodeID"], mark) for node in others}
        return sorted(address for address, answer in asked.items() if not _seen(answer))
    finally:
        mark.unlink()


def _asked(node: str, mark: Path) -> ray.ObjectRef:
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(Path.exists).options(scheduling_strategy=pinned).remote(mark)


def _seen(answer: ray.ObjectRef) -> bool:
    try:
        return ray.get(answer, timeout=SEEN_SECONDS)
    except RayError:
        return False
