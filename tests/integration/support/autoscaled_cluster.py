"""A Ray cluster of several nodes on this host: Ray's own multi-node test cluster (ray.cluster_utils), whose nodes its
autoscaler adds, by Ray's fake node provider. ray.cluster_utils.AutoscalingCluster, which does the same, begins and ends
by stopping every Ray of the host."""

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
from cluster_processes import processes_of, shut_down
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import Cluster

# What a node of the autoscaler has: one virtual device, and processors as verl's placement groups ask for them.
NODE = {"CPU": 6, "GPU": 1, "object_store_memory": 100_000_000}
# What a cluster's configuration must have, where nothing is to be copied or run on new nodes.
EMPTY = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


class AutoscaledCluster:
    """A head node with `devices` virtual devices, and up to `nodes` more nodes with one each, as soon
    as somebody asks for them."""

    def __init__(self, devices: int, nodes: int):
        # Short: sockets are made below it. A directory of its own, or other drivers of this host
        # would find this cluster.
        self._folder = Path(tempfile.mkdtemp(prefix="fuse", dir="/tmp"))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        types: dict[str, Any] = {
            "ray.head.default": {"resources": {"CPU": 32, "GPU": devices}, "node_config": {}, "max_workers": 0},
            "spot": {"resources": NODE, "node_config": {}, "min_workers": 0, "max_workers": nodes},
        }
        address = f"{ray.util.get_node_ip_address()}:{port}"
        config = {
            "cluster_name": "fuse",
            "max_workers": nodes,
            "idle_timeout_minutes": 60,
            "upscaling_speed": 10.0,
            # All nodes of this host have one address.
            "provider": {
                "type": "fake_multinode",
                "gcs_address": address,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{key: [] for key in EMPTY},
        }
        scaling = self._folder / "autoscaler.json"
        scaling.write_text(json.dumps(config))
        os.environ |= {"RAY_TMPDIR": str(self._folder), "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 32,
                "num_gpus": devices,
                "gcs_server_port": port,
                "include_dashboard": False,
                # Ray leaves a socket open where the default port of its dashboard is in use.
                "dashboard_port": None,
                "object_store_memory": 200_000_000,
                "autoscaling_config": str(scaling),
                # The autoscaler knows the head node by this name.
                "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID},
                # A node that is gone is noticed within seconds.
                "_system_config": {
                    "health_check_initial_delay_ms": 0,
                    "health_check_period_ms": 1000,
                    "health_check_failure_threshold": 3,
                },
            },
        )
        self.address = self._cluster.address
        assert self.address == address, (self.address, address)

    def processes(self) -> list[psutil.Process]:
        """Everything that the cluster has started."""
        return processes_of(self._folder)

    def command_lines(self) -> list[list[str]]:
        """What these processes are."""
        found = []
        for process in self.processes():
            try:
                found.append(process.cmdline())
            except psutil.Error:
                continue
        return found

    def remove(self, node: str) -> None:
        """Take a node (by its id) away, as a cloud does: everything on it is gone at once."""
        (name,) = [
            known["RayletSocketName"] for known in self._cluster.global_state.node_table() if known["NodeID"] == node
        ]
        (raylet,) = [
            process
            for process in self.processes()
            if process.name() == "raylet" and any(part.endswith(f"={name}") for part in process.cmdline())
        ]
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()

    def shutdown(self) -> None:
        """End every process, and leave no file."""
        shut_down(self._cluster, self._folder)
