"""Clusters: built in, from YAML, and refusals."""

from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import DEVICES, Cluster, Mesh, cluster_named

ACME = """
nodes: 2
devices_per_node: 4
device: {name: ACME, memory: 1.0e10, flops: 1.0e14, bandwidth: 1.0e12}
intra_bandwidth: 1.0e11
inter_bandwidth: 1.0e10
host_bandwidth: 1.0e10
price_per_device_hour: 0.5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_built_in_cluster(name: str):
    cluster = cluster_named(name.lower(), nodes=3)
    assert cluster.device is DEVICES[name]
    assert cluster.devices == 3 * cluster.devices_per_node


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes", "terabytes", "link"),
    [
        ("A100-40G", 312, 40, 1.555, 600), ("H800", 989, 80, 3.35, 400), ("H20", 148, 96, 4.0, 900),
        ("B200", 2250, 180, 8.0, 1800), ("GB200", 2500, 186, 8.0, 1800), ("MI300X", 1307.4, 192, 5.3, 896),
        ("RTX-4090", 165.2, 24, 1.008, 64),
    ],
)  # fmt: skip
def test_figures_are_those_of_data_sheets(name: str, teraflops: float, gigabytes: int, terabytes: float, link: float):
    """Data sheets give the memory in their gigabytes, of which the driver keeps some, and links both ways together."""
    cluster = cluster_named(name)
    assert (cluster.device.flops, cluster.device.bandwidth) == (teraflops * 1e12, terabytes * 1e12)
    assert 0.92 < cluster.device.memory / (gigabytes * 2**30) <= 1.04
    assert cluster.intra_bandwidth == link / 2 * 1e9


@pytest.mark.parametrize(("short", "name"), [("a100", "A100-80G"), ("4090", "RTX-4090"), ("RTX4090", "RTX-4090")])
def test_usual_names_are_known(short: str, name: str):
    assert cluster_named(short).device.name == name


def test_keys_left_out_come_from_the_built_in(tmp_path: Path):
    cluster = Cluster.read(write(tmp_path, "device: H100\nnodes: 4\nprice_per_device_hour: 2"))
    assert cluster == cluster_named("H100", 4).__class__(4, 8, DEVICES["H100"], 450e9, 50e9, 64e9, 2.0)


def test_a_device_of_ones_own(tmp_path: Path):
    cluster = Cluster.read(write(tmp_path, ACME))
    assert (cluster.devices, cluster.device.name, cluster.device.memory) == (8, "ACME", 1e10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: H100\nnodes: 0", "nodes=0; needs a whole number >= 1"),
        ("device: H100\ndevices_per_node: 0", "devices_per_node=0"),
        ("device: H10", r"device 'H10': unknown \(did you mean 'H100'\?\); built in: A100-40G, A100-80G, H100"),
        ("device: H100\nnodes: 99999999", "nodes=99999999 of 8 are 799999992 devices; needs at most 131072"),
        ("device: H100\nnode: 2", r"cluster.node: unknown key \(did you mean 'nodes'\?\)"),
        ("device: H100\nnodes: two", "cluster.nodes='two': needs a whole number"),
        ("device: H100\nintra_bandwidth: 0", "intra_bandwidth=0.0; needs a number > 0"),
        ("device: H100\nprice_per_device_hour: -1", "price_per_device_hour=-1.0; needs a number >= 0"),
        ("nodes: 2", "needs a block with the key device"),
        ("device: {name: X, memory: 1.0, flops: 1.0}", "missing nodes, devices_per_node, .*device.bandwidth"),
        (ACME.replace("memory: 1.0e10", "memory: 0"), "memory=0.0; needs a number > 0"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(FuseError, match=rf"cluster\.yaml: .*{message}"):
        Cluster.read(write(tmp_path, text))


def test_meshes():
    mesh = Mesh(4, 8)
    assert (mesh.end, str(mesh), list(mesh.nodes(8))) == (12, "4-11", [0, 1])
    assert mesh.overlaps(Mesh(11, 1))
    assert not mesh.overlaps(Mesh(12, 4))
    with pytest.raises(FuseError, match="mesh of 0 devices"):
        Mesh(0, 0)
