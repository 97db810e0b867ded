"""CLUSTER on the command line: a YAML file, or a built-in device with a number of nodes."""

import re
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Cluster, cluster_named

HELP = "A cluster file (YAML), or DEVICE or DEVICExNODES for built-in nodes, such as h100x4."


def read_cluster(text: str) -> Cluster:
    """A FuseError says what is wrong with the file, or which devices are built in."""
    if text.endswith((".yaml", ".yml")) or Path(text).is_file():
        return Cluster.read(Path(text))
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", text)
    if match is None:
        raise FuseError("cluster '': needs a YAML file or a device")
    return cluster_named(match[1], nodes=int(match[2] or 1))
