"""Reads CLUSTER on the command line: a YAML file, or a built-in device with a number of nodes."""

import os
import re
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import DEVICES, MOST_DEVICES, Cluster, cluster_named

CLUSTER_HELP = (
    "A cluster file (YAML), or DEVICE or DEVICExNODES for built-in nodes, such as h100x4. Devices: "
    f"{', '.join(DEVICES)}."
)


def read_cluster(text: str) -> Cluster:
    """Return the cluster that `text` names; a FuseError names the fault of the file, or the built-in devices."""
    if text.endswith((".yaml", ".yml")) or os.path.isfile(text):
        return Cluster.read(Path(text))
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", text)
    if match is None:
        raise FuseError("cluster '': needs a YAML file or a device")
    nodes = match[2] or "1"
    # Python reads no number of thousands of digits.
    if len(nodes) > 20:
        raise FuseError(f"cluster: nodes is a number of {len(nodes)} digits; needs at most {MOST_DEVICES} devices")
    return cluster_named(match[1], nodes=int(nodes))


def price_of(cluster: Cluster) -> str:
    """Return the price of a device for an hour in words, and whether the price is only the example that comes with the
    device."""
    price, name = cluster.price_per_device_hour, cluster.device.name
    if not price:
        return "costs nothing: the cluster has no price_per_device_hour"
    example = name in DEVICES and price == cluster_named(name).price_per_device_hour
    note = " (an example; set price_per_device_hour in a cluster file)" if example else ""
    return f"costs at {price:g} USD per device and hour{note}"
