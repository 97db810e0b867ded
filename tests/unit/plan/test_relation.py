import itertools

import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.plan.meshes import legal_meshes
from verl_fuse.plan.relation import relation, relations
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model_names import model_named


def lies(mesh: Mesh, other: Mesh, node: int = 8) -> int:
    return relation(mesh.first, mesh.end, other.first, other.end, node)


def test_relations_read_like_pictures():
    assert lies(Mesh(0, 8), Mesh(8, 8)) == 0
    assert lies(Mesh(0, 2), Mesh(4, 4)) == 1
    assert lies(Mesh(0, 4), Mesh(8, 4)) == 0
    assert lies(Mesh(0, 8), Mesh(0, 8)) == 2
    assert [lies(Mesh(0, 16), Mesh(8 * i, 8)) for i in range(3)] == [2, 3, 0]


@pytest.mark.parametrize(
    ("source", "target"), [("tp2 pp2", "tp4 dp2"), ("tp8 dp2", "pp4 dp4"), ("dp8", "tp2"), ("tp4", "tp2 pp2 dp8")]
)
def test_meshes_with_one_relation_take_the_same_time(source: str, target: str):
    cluster, model = cluster_named("a100", 4), model_named("llama-7b")
    cost, layouts = AnalyticCost(cluster), (Layout.parse(source), Layout.parse(target))
    meshes = [[m for m in legal_meshes(cluster) if m.size == layout.devices] for layout in layouts]
    seconds: dict[int, set[float]] = {}
    for mesh, other in itertools.product(*meshes):
        key = lies(mesh, other)
        assert 0 <= key < relations(mesh.size, other.size, 8)
        seconds.setdefault(key, set()).add(round(cost.transfer(model, (mesh, layouts[0]), (other, layouts[1])), 12))
    assert {len(found) for found in seconds.values()} == {1}
