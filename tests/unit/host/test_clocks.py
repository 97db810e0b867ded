"""Offsets of other nodes' clocks, over clocks that the test turns; see the docstring of
verl_fuse/host/record/clocks.py."""

import random
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from verl_fuse.host.record import clocks
from verl_fuse.host.record.clocks import NodeClocks, clock_offset


class Time:
    """This node's clock, which the way to another node and back moves on."""

    def __init__(self, ways):
        self.now, self._ways = 1000.0, iter(ways)

    def __call__(self):
        return self.now

    def ask(self, ahead):
        there, back = next(self._ways)
        self.now += there
        answer = self.now + ahead
        self.now += back
        return answer


@pytest.mark.parametrize("ahead", [-3600.0, -0.25, 0.0, 12.5])
def test_an_offset_is_wrong_by_half_of_the_shortest_round_trip_at_most(ahead):
    draw = random.Random(7)
    for _ in range(200):
        ways = [(draw.expovariate(100), draw.expovariate(100)) for _ in range(clocks.ROUND_TRIPS)]
        time = Time(ways)
        found = clock_offset(lambda time=time: time.ask(ahead), time)
        assert abs(found - ahead) <= min(there + back for there, back in ways) / 2 + 1e-9


@pytest.fixture
def nodes(monkeypatch):
    """Nodes by how far their clocks are ahead; one that is taken out is dead."""
    ahead, asked = {"here": 0.0, "there": 90.0}, []

    def started(node):
        asked.append(node)
        return SimpleNamespace(now=SimpleNamespace(remote=lambda: node))

    def get(node, timeout):
        if node not in ahead:
            raise ActorDiedError
        return clocks.time.time() + ahead[node]

    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(clocks, "ray", SimpleNamespace(get=get, get_runtime_context=lambda: context))
    monkeypatch.setattr(clocks, "started_clock", started)
    return ahead, asked


def test_this_node_is_not_asked_and_another_one_over_one_actor(nodes):
    ahead, asked = nodes
    found = NodeClocks()
    assert found.offsets({"here"}) == {"here": 0.0}
    assert asked == []
    assert found.offsets({"here", "there"}) == pytest.approx({"here": 0.0, "there": 90.0}, abs=0.01)
    ahead["there"] = 91.0
    assert found.offsets({"there"}) == pytest.approx({"there": 91.0}, abs=0.01)
    assert asked == ["there"]


def test_a_node_that_is_gone_keeps_its_offset_and_is_named_once(nodes, caplog):
    ahead, _ = nodes
    found = NodeClocks()
    found.offsets({"there"})
    del ahead["there"]
    for _ in range(2):
        assert found.offsets({"there", "never"}) == pytest.approx({"there": 90.0, "never": 0.0}, abs=0.01)
    said = sorted(record.getMessage() for record in caplog.records)
    assert [line.split(" (")[0] for line in said] == [
        "the clock of node never cannot be asked",
        "the clock of node there cannot be asked",
    ]
