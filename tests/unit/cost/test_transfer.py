"""Moving weights between placements: what stays, what comes from the node, what crosses the network."""

import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model_names import model_named

LLAMA = model_named("llama-7b")
COST = AnalyticCost(cluster_named("A100-80G", nodes=4))
BYTES = 2 * LLAMA.parameters
INTRA, INTER = 300e9 * COST.efficiency.network, 25e9 * COST.efficiency.network


def seconds(source: tuple[int, str], target: tuple[int, str]) -> float:
    """From layouts that begin at the given devices."""
    placements = [(Mesh(first, Layout.parse(text).devices), Layout.parse(text)) for first, text in (source, target)]
    return COST.transfer(LLAMA, *placements)


@pytest.mark.parametrize("placement", [(0, "tp8"), (8, "tp4 pp2"), (0, "tp8 dp4")])
def test_nothing_moves_between_equal_placements(placement: tuple[int, str]):
    assert seconds(placement, placement) == 0.0


def test_within_a_node_links_of_the_node_are_used():
    """Device 1 has the second eighth and wants the second half: all of it is new."""
    assert seconds((0, "tp8"), (0, "tp2 dp4")) == pytest.approx(BYTES / 2 / INTRA, rel=0.01)


def test_between_nodes_every_sender_sends_its_part_over_its_adapter():
    assert seconds((0, "tp8"), (8, "tp8")) == pytest.approx(BYTES / 8 / INTER, rel=0.01)


def test_a_sender_is_shared_by_the_nodes_that_want_its_part():
    assert seconds((0, "tp8"), (8, "tp8 dp2")) == pytest.approx(2 * BYTES / 8 / INTER, rel=0.01)


def test_copies_share_the_sending():
    """Two nodes serve two nodes as fast as one serves one."""
    alone, copies = seconds((0, "tp8"), (8, "tp8")), seconds((0, "tp8 dp2"), (16, "tp8 dp2"))
    assert copies == pytest.approx(alone, rel=0.01)


def test_more_data_never_moves_faster():
    small, large = model_named("llama-7b"), model_named("llama-13b")
    source, target = (Mesh(0, 8), Layout(tp=8)), (Mesh(0, 16), Layout(tp=4, dp=4))
    assert COST.transfer(small, source, target) < COST.transfer(large, source, target)
