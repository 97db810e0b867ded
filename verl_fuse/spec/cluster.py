"""A cluster of equal nodes of equal devices.

Invariants (tests/unit/spec/test_cluster.py):
- there is at least one node and one device, and every speed and size is positive;
- a YAML file with an unknown key, device or value is refused, naming it and what is allowed.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block
from verl_fuse.spec.yaml_file import read_yaml

GIB = 2**30


def _check_positive(where: str, block: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(block, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise FuseError(f"{where}: {name}={value!r}; needs a number > 0")


@dataclass(frozen=True)
class Device:
    """`memory` in bytes, `flops` the peak of dense bf16 matrix products per second, `bandwidth` of its memory in bytes per second."""

    name: str
    memory: float
    flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive(f"device {self.name!r}", self, ("memory", "flops", "bandwidth"))

    @property
    def is_cpu(self) -> bool:
        return self.name.upper().startswith("CPU")


# Vendor figures (data sheets; dense bf16, not the sparse number). Memory is what the driver reports.
DEVICES = {
    "A100-80G": Device("A100-80G", 80 * GIB, 312e12, 2.039e12),
    "H100": Device("H100", 79.6 * GIB, 989e12, 3.35e12),
    "H200": Device("H200", 140.4 * GIB, 989e12, 4.8e12),
    "L40S": Device("L40S", 45.0 * GIB, 362e12, 0.864e12),
    # One core of a server processor running fp32; the order of magnitude. `verl-fuse profile` measures the machine at hand.
    "CPU": Device("CPU", 8 * GIB, 5e10, 1e10),
}


@dataclass(frozen=True)
class Cluster:
    """Bandwidths are bytes per second per device and direction: between devices of a node, between nodes, to host memory."""

    nodes: int
    devices_per_node: int
    device: Device
    intra_bandwidth: float
    inter_bandwidth: float
    host_bandwidth: float
    price_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FuseError(f"cluster: {name}={value!r}; needs a whole number >= 1")
        _check_positive("cluster", self, ("intra_bandwidth", "inter_bandwidth", "host_bandwidth"))
        if not (math.isfinite(self.price_per_device_hour) and self.price_per_device_hour >= 0):
            raise FuseError(f"cluster: price_per_device_hour={self.price_per_device_hour!r}; needs a number >= 0")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def read(cls, path: Path) -> "Cluster":
        """From YAML; keys left out come from the built-in cluster of that device. Every error names the file."""
        data = read_yaml(path)
        try:
            return cls.from_dict(data)
        except FuseError as error:
            raise FuseError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Any) -> "Cluster":
        """`device` is a built-in name, or a block of the fields of `Device`; then every other key is needed too."""
        if not isinstance(data, Mapping) or "device" not in data:
            raise FuseError(f"cluster: needs a block with the key device: one of {', '.join(DEVICES)}, or a block")
        if isinstance(data["device"], Mapping):
            missing = [f.name for f in dataclasses.fields(cls) if f.name not in (*data, "price_per_device_hour")]
            missing += [f"device.{f.name}" for f in dataclasses.fields(Device) if f.name not in data["device"]]
            if missing:
                raise FuseError(f"cluster: missing {', '.join(missing)}")
            return read_block(cls, data, "cluster")
        built_in = cluster_named(str(data["device"]))
        known = {field.name: getattr(built_in, field.name) for field in dataclasses.fields(cls)}
        return read_block(cls, {**known, **data, "device": dataclasses.asdict(built_in.device)}, "cluster")


# NVLink and network adapter per device (vendor figures, one direction); host: PCIe. Prices are round figures of rental offers in 2025, to
# be replaced by one's own: they only scale costs.
_NODES = {
    "A100-80G": Cluster(1, 8, DEVICES["A100-80G"], 300e9, 25e9, 32e9, 1.8),
    "H100": Cluster(1, 8, DEVICES["H100"], 450e9, 50e9, 64e9, 2.8),
    "H200": Cluster(1, 8, DEVICES["H200"], 450e9, 50e9, 64e9, 3.5),
    "L40S": Cluster(1, 8, DEVICES["L40S"], 32e9, 6.25e9, 32e9, 1.0),
    "CPU": Cluster(1, 2, DEVICES["CPU"], 5e9, 1e9, 5e9, 0.05),
}
_BY_LOWER_NAME = {name.lower(): name for name in _NODES} | {"a100": "A100-80G"}


def cluster_named(device: str, nodes: int = 1) -> Cluster:
    """Built-in nodes of eight devices (two for CPU) by the device's name, in any case."""
    key = device.lower()
    if key not in _BY_LOWER_NAME:
        near = difflib.get_close_matches(key, _BY_LOWER_NAME, n=1, cutoff=0.4)
        hint = f" (did you mean {_BY_LOWER_NAME[near[0]]!r}?)" if near else ""
        raise FuseError(f"device {device!r}: unknown{hint}; built in: {', '.join(_NODES)}")
    return dataclasses.replace(_NODES[_BY_LOWER_NAME[key]], nodes=nodes)


@dataclass(frozen=True, order=True)
class Mesh:
    """`size` consecutive devices from `first`."""

    first: int
    size: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.size < 1:
            raise FuseError(f"mesh of {self.size} devices from {self.first}; needs first >= 0 and size >= 1")

    @property
    def end(self) -> int:
        return self.first + self.size

    def overlaps(self, other: "Mesh") -> bool:
        return self.first < other.end and other.first < self.end

    def nodes(self, devices_per_node: int) -> range:
        """The nodes it touches."""
        return range(self.first // devices_per_node, (self.end - 1) // devices_per_node + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.end - 1}"
