"""A Ray cluster of several nodes on this host: real raylets, each with a loopback address of its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_processes import shut_down
from ray.cluster_utils import Cluster

from verl_fuse_cpu.environment import environment

SUPPORT = Path(__file__).parent
# Run by every Python that starts on a node with another clock.
CLOCK = """
import time
true = time.time
time.time = lambda: true() + {ahead}
"""
HEAD = "127.0.0.2"
AHEAD = 90.0
STORE_BYTES = 300_000_000


class Nodes:
    """A head node without devices at HEAD, and one node for each of `devices`, with so many virtual devices.

    The last node's clock is `ahead` seconds ahead of the others'; its processes work in `elsewhere`, so that a relative
    path names another folder there.
    """

    def __init__(self, devices: tuple[int, ...], ahead: float, elsewhere: Path):
        # Short: sockets are made below it. Its own, or other drivers of this host would find this cluster.
        self._folder = Path(tempfile.mkdtemp(prefix="fuse", dir="/tmp"))
        os.environ["RAY_TMPDIR"] = str(self._folder)
        # Ray leaves a socket open where the default port of its dashboard is in use.
        dashboard = {"include_dashboard": False, "dashboard_port": None}
        common: dict[str, Any] = {"num_cpus": 8, "object_store_memory": STORE_BYTES, **dashboard}
        self._cluster = Cluster(initialize_head=True, head_node_args={**common, "num_gpus": 0, "node_ip_address": HEAD})
        self.address = self._cluster.address
        self.addresses = tuple(f"127.0.0.{3 + number}" for number in range(len(devices)))
        site = elsewhere / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(CLOCK.format(ahead=ahead))
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        for number, count in enumerate(devices):
            last = number == len(devices) - 1
            with chdir(elsewhere if last else Path.cwd()):
                self._cluster.add_node(
                    wait=False,
                    node_ip_address=self.addresses[number],
                    num_gpus=count,
                    env_vars={"PYTHONPATH": path} if last else None,
                    **common,
                )
        self._cluster.wait_for_nodes()

    def shutdown(self) -> None:
        """End every process, and leave no file."""
        shut_down(self._cluster, self._folder)


@contextmanager
def two_nodes(folder: Path, **variables: str) -> Iterator[Nodes]:
    """Two nodes with a virtual device each, the second one's clock AHEAD, in folders of their own below `folder`.

    Their processes have `variables` in their environment."""
    here, elsewhere = folder / "here", folder / "elsewhere"
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers inherit the environment of their node.
        for name, value in {**environment(), **variables}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_TMPDIR", "")
        here.mkdir()
        elsewhere.mkdir()
        with chdir(here):
            nodes = Nodes((1, 1), AHEAD, elsewhere)
            try:
                yield nodes
            finally:
                nodes.shutdown()
