"""Describes a cluster of equal nodes of equal devices.

Invariants (tests/unit/spec/test_cluster.py):
- there is at least one node and one device, and every speed and size is positive;
- a YAML file with an unknown key, device or value is refused, naming it and the allowed values.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import check_counts, read_block
from verl_fuse.spec.units import GIB
from verl_fuse.spec.yaml_file import read_yaml


def _check_positive(where: str, block: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(block, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise FuseError(f"{where}: {name}={value!r}; needs a number > 0")


@dataclass(frozen=True)
class Device:
    """A device has `memory` in bytes; `flops` is the peak of dense bf16 matrix products per second, `bandwidth` that of
    its memory in bytes per second."""

    name: str
    memory: float
    flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive(f"device {self.name!r}", self, ("memory", "flops", "bandwidth"))

    @property
    def is_cpu(self) -> bool:
        return self.name.upper().startswith("CPU")


# Dense bf16 FLOP/s (not the sparse number), memory as the driver reports it (a little less than the data sheet's),
# bytes per second of memory.
DEVICES = {
    # NVIDIA A100 data sheet (SXM4, 40 and 80 GB).
    "A100-40G": Device("A100-40G", 39.4 * GIB, 312e12, 1.555e12),
    "A100-80G": Device("A100-80G", 80 * GIB, 312e12, 2.039e12),
    # NVIDIA H100 data sheet (SXM5).
    "H100": Device("H100", 79.6 * GIB, 989e12, 3.35e12),
    # NVIDIA H200 data sheet (SXM).
    "H200": Device("H200", 140.4 * GIB, 989e12, 4.8e12),
    # An H100 SXM5 with fewer NVLinks. NVIDIA published no data sheet; vendors' server data sheets give these figures.
    "H800": Device("H800", 79.6 * GIB, 989e12, 3.35e12),
    # The same for the H20 (SXM5, 96 GB).
    "H20": Device("H20", 95.6 * GIB, 148e12, 4.0e12),
    # NVIDIA GH200 data sheet (96 GB of HBM3).
    "GH200": Device("GH200", 95.6 * GIB, 989e12, 4.0e12),
    # NVIDIA DGX B200 data sheet, over its eight devices: 72 PFLOP/s of sparse FP8, a quarter of which is
    # dense bf16; 1440 GB; 64 TB/s.
    "B200": Device("B200", 179.1 * GIB, 2250e12, 8.0e12),
    # NVIDIA GB200 NVL72 data sheet, over its 72 devices: 360 PFLOP/s of sparse bf16, half of it
    # dense; 13.4 TB; 576 TB/s.
    "GB200": Device("GB200", 185.0 * GIB, 2500e12, 8.0e12),
    # NVIDIA L40S data sheet.
    "L40S": Device("L40S", 45.0 * GIB, 362e12, 0.864e12),
    # NVIDIA Ada GPU architecture whitepaper: bf16 with fp32 accumulation.
    "RTX-4090": Device("RTX-4090", 24.0 * GIB, 165.2e12, 1.008e12),
    # AMD Instinct MI300X data sheet.
    "MI300X": Device("MI300X", 191.9 * GIB, 1307.4e12, 5.3e12),
    # One core of a server processor running fp32; the order of magnitude. `verl-fuse profile`
    # measures the machine at hand.
    "CPU": Device("CPU", 8 * GIB, 5e10, 1e10),
}
# Several times the size of the largest clusters; a larger number is a mistake in the input.
MOST_DEVICES = 2**17


@dataclass(frozen=True)
class Cluster:
    """Bandwidths are bytes per second per device and direction: between devices of a node, between nodes, to host
    memory. Prices are in USD."""

    nodes: int
    devices_per_node: int
    device: Device
    intra_bandwidth: float
    inter_bandwidth: float
    host_bandwidth: float
    price_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        check_counts("cluster", self, ("nodes", "devices_per_node"))
        if self.devices > MOST_DEVICES:
            raise FuseError(
                f"cluster: nodes={self.nodes} of {self.devices_per_node} are {self.devices} devices; needs at most "
                f"{MOST_DEVICES}"
            )
        _check_positive("cluster", self, ("intra_bandwidth", "inter_bandwidth", "host_bandwidth"))
        if not (math.isfinite(self.price_per_device_hour) and self.price_per_device_hour >= 0):
            raise FuseError(f"cluster: price_per_device_hour={self.price_per_device_hour!r}; needs a number >= 0")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def read(cls, path: Path) -> "Cluster":
        """Read a cluster from YAML; keys left out come from the built-in cluster of that device. Every error names the
        file."""
        data = read_yaml(path)
        try:
            return cls.from_dict(data)
        except FuseError as error:
            raise FuseError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Any) -> "Cluster":
        """Build from parsed YAML; `device` is a built-in name, or a block of the fields of `Device`; then every other
        key is needed too."""
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


# Bytes per second of one direction, per device: link in the node, network adapter, host (PCIe 4: 32e9, PCIe
# 5: 64e9, of 16 lanes). Prices are examples, round figures of rental offers in 2025, to be replaced by the user's own:
# they only scale costs.
_NODES = {
    # NVLink 3: 600 GB/s both ways (A100 data sheet); 200 Gb/s adapters (DGX A100 data sheet).
    "A100-40G": Cluster(1, 8, DEVICES["A100-40G"], 300e9, 25e9, 32e9, 1.3),
    "A100-80G": Cluster(1, 8, DEVICES["A100-80G"], 300e9, 25e9, 32e9, 1.8),
    # NVLink 4: 900 GB/s both ways (H100 and H200 data sheets); 400 Gb/s adapters (DGX H100 and H200 data sheets).
    "H100": Cluster(1, 8, DEVICES["H100"], 450e9, 50e9, 64e9, 2.8),
    "H200": Cluster(1, 8, DEVICES["H200"], 450e9, 50e9, 64e9, 3.5),
    # A node of four, 150 GB/s of NVLink 4 each way from one to each other, NVLink-C2C of 900 GB/s both ways (GH200 data
    # sheet), 200 Gb/s adapters (CSCS, Alps).
    "GH200": Cluster(1, 4, DEVICES["GH200"], 450e9, 25e9, 450e9, 2.8),
    # NVLink 4, cut to 400 GB/s both ways (H800), whole (H20): vendors' server data sheets.
    "H800": Cluster(1, 8, DEVICES["H800"], 200e9, 50e9, 64e9, 2.2),
    "H20": Cluster(1, 8, DEVICES["H20"], 450e9, 50e9, 64e9, 1.4),
    # NVLink 5: 1.8 TB/s both ways, 14.4 TB/s over eight; 400 Gb/s adapters (DGX B200 data sheet).
    "B200": Cluster(1, 8, DEVICES["B200"], 900e9, 50e9, 64e9, 4.5),
    # A node is a compute tray of four. NVLink 5 reaches all trays of a rack, which is counted inside a tray only:
    # between trays 400 Gb/s adapters (GB200 NVL72 data sheet; give inter_bandwidth=900e9 for up to 18 nodes of one
    # rack). Host: NVLink-C2C, 900 GB/s both ways for two.
    "GB200": Cluster(1, 4, DEVICES["GB200"], 900e9, 50e9, 225e9, 6.0),
    # No NVLink: PCIe 4 (data sheets). Network adapters are the builder's choice; here 400 Gb/s for eight devices.
    "L40S": Cluster(1, 8, DEVICES["L40S"], 32e9, 6.25e9, 32e9, 1.0),
    "RTX-4090": Cluster(1, 8, DEVICES["RTX-4090"], 32e9, 6.25e9, 32e9, 0.4),
    # Seven Infinity Fabric links of 128 GB/s both ways (MI300X data sheet); 400 Gb/s adapters, as in vendors' servers.
    "MI300X": Cluster(1, 8, DEVICES["MI300X"], 448e9, 50e9, 64e9, 2.2),
    "CPU": Cluster(1, 2, DEVICES["CPU"], 5e9, 1e9, 5e9, 0.05),
}
_BY_LOWER_NAME = {name.lower(): name for name in _NODES} | {
    "a100": "A100-80G",
    "4090": "RTX-4090",
    "rtx4090": "RTX-4090",
}


def cluster_named(device: str, nodes: int = 1) -> Cluster:
    """Return built-in nodes by the device's name, in any case: eight devices, four for GH200 and GB200, two for CPU."""
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
        """Return the nodes that the mesh touches."""
        return range(self.first // devices_per_node, (self.end - 1) // devices_per_node + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.end - 1}"
