"""Two nodes: real raylets with addresses of their own, the second one's clock a minute and a half ahead and its working
directory another. Weights, stores, spans and folders between processes there; test_two_nodes_run.py has a whole run."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
import ray
from node_ranks import LAYERS, WIDTH, NodeRank
from ray._private.internal_api import node_stats
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from two_nodes import AHEAD, HEAD, STORE_BYTES, two_nodes

from verl_fuse.host.record.clocks import NodeClocks
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.record.shared import nodes_without, warn_unshared
from verl_fuse.host.record.spans import start_collector
from verl_fuse.host.weights.exports import joined
from verl_fuse.host.weights.memory import store_bytes

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

MODEL_BYTES = 4 * LAYERS * WIDTH * WIDTH
# Small objects of Ray's own are in the store as well.
BESIDE = 300_000


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two nodes with a virtual device each, beside a head without one."""
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def ranks(nodes):
    """A training rank on the first node and two on the second, which have joined."""
    ray.init(address=nodes.address, _node_ip_address=HEAD, log_to_driver=False)
    names = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    first, second = nodes.addresses
    actor = ray.remote(num_cpus=0)(NodeRank)
    made = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(names[address], soft=False)).remote(rank, 3)
        for rank, address in enumerate((first, second, second))
    ]
    host, port = ray.get(made[0].open_store.remote())
    ray.get([rank.join.remote(host, port) for rank in made])
    yield made
    ray.shutdown()


def each(ranks, method: str, *args) -> list:
    return ray.get([getattr(rank, method).remote(*args) for rank in ranks])


def created(address: str) -> int:
    """Bytes that were ever put into the object store of the node at this address, or pulled into it."""
    (node,) = [node for node in ray.nodes() if node["NodeManagerAddress"] == address]
    stats = node_stats(address, node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.cumulative_created_bytes


def test_these_are_nodes_with_clocks_and_addresses_of_their_own(nodes, ranks):
    first, second, third = each(ranks, "place")
    assert (first["address"], second["address"], third["address"]) == (*nodes.addresses, nodes.addresses[1])
    assert second["node"] == third["node"] != first["node"]
    assert second["time"] - first["time"] == pytest.approx(AHEAD, abs=30)
    assert second["folder"] != first["folder"]
    assert [store_bytes(place["node"]) for place in (first, second)] == [STORE_BYTES] * 2


def test_weights_of_slices_are_pulled_once_per_node(nodes, ranks):
    """The first node has a third of them and a slice, the second one two thirds and two slices."""
    before = [created(address) for address in nodes.addresses]
    export = joined(each(ranks, "export"))
    assert export.nbytes == MODEL_BYTES
    left = [created(address) for address in nodes.addresses]
    assert each(ranks, "load", export) == [True, True, True]
    pulled = [created(address) for address in nodes.addresses]
    put = [after - at for at, after in zip(before, left, strict=True)]
    assert put == [pytest.approx(MODEL_BYTES * part / 3, abs=BESIDE) for part in (1, 2)]
    came = [after - at for at, after in zip(left, pulled, strict=True)]
    assert came == [pytest.approx(MODEL_BYTES * part / 3, abs=BESIDE) for part in (2, 1)]


def test_whole_weights_for_standalone_replicas_are_left_on_every_node(nodes, ranks):
    before = [created(address) for address in nodes.addresses]
    # A bucket holds a quarter of the model: two are the first rank's.
    left = each(ranks, "export_whole", MODEL_BYTES // LAYERS)
    put = [created(address) - at for address, at in zip(nodes.addresses, before, strict=True)]
    assert [len(buckets) for buckets in left] == [2, 1, 1]
    assert put == [pytest.approx(MODEL_BYTES / 2, abs=BESIDE)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_stores_of_weight_syncs_listen_at_the_address_of_their_node_alone(nodes, ranks, rank):
    own = nodes.addresses[rank]
    assert ray.get(ranks[rank].listen.remote()) == {
        engine: [own, own] for engine in ("FuseCheckpointEngine", "GlooCheckpointEngine")
    }


def test_offsets_of_clocks_are_measured(nodes, ranks):
    names = [place["node"] for place in each(ranks, "place")]
    offsets = NodeClocks().offsets(set(names))
    assert offsets == {names[0]: pytest.approx(0.0, abs=1.0), names[1]: pytest.approx(AHEAD, abs=1.0)}


def test_a_timeline_has_one_clock(ranks):
    """Without offsets the second node's spans would lie behind the end of the step."""
    collector = start_collector()
    journal = Journal(SimpleNamespace(fuse_event=lambda event: None), collector)
    journal.begin_step(1, 1, 1)
    with journal.stage("gen"):
        each(ranks, "record")
    journal.step.end = journal.step.clock.now
    timeline = journal.timeline("two nodes", lambda span: span)
    (around,) = timeline.on("step")
    spans = [span for rank in range(3) for span in timeline.on(f"rank {rank}")]
    assert [span.name for span in spans] == ["work"] * 3
    for span in spans:
        assert around.start - 0.5 <= span.start <= span.end <= around.end + 0.5
        assert span.end - span.start == pytest.approx(0.2, abs=0.15)


def test_a_folder_that_a_node_does_not_see_is_said(nodes, ranks, tmp_path, caplog):
    """By the working directory of whoever looks: the second node's is another one."""
    assert nodes_without(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    warn_unshared(tmp_path)
    assert caplog.records == []
    own = Path("/proc/self/cwd")
    assert nodes_without(own) == [nodes.addresses[1]]
    warn_unshared(own)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"fuse.run_dir=/proc/self/cwd: what node {HEAD} writes there is not found on {nodes.addresses[1]}."
    )
    assert "checkpoints in parts on each node" in said
    assert list(Path.cwd().glob(".seen-*")) == []
