from verl_fuse.plan.meshes import legal_meshes
from verl_fuse.spec.cluster import Mesh, cluster_named


def test_slices_of_a_node_and_whole_nodes():
    meshes = legal_meshes(cluster_named("h100", 2))
    assert [m for m in meshes if m.size == 4] == [Mesh(0, 4), Mesh(4, 4), Mesh(8, 4), Mesh(12, 4)]
    assert [m for m in meshes if m.size >= 8] == [Mesh(0, 8), Mesh(8, 8), Mesh(0, 16)]
    assert len(meshes) == len(set(meshes)) == 16 + 8 + 4 + 3


def test_on_large_clusters_every_split_in_two_is_there():
    meshes = set(legal_meshes(cluster_named("h100", 128)))
    assert all({Mesh(0, 8 * k), Mesh(8 * k, 1024 - 8 * k)} <= meshes for k in range(1, 128))
    assert Mesh(512 + 256, 256) in meshes
    assert Mesh(8, 16) not in meshes


def test_nodes_of_odd_size():
    from dataclasses import replace

    six = replace(cluster_named("h100"), devices_per_node=6)
    assert sorted({m.size for m in legal_meshes(six)}) == [1, 2, 6]
