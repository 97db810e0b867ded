"""Shows the invariants of `verl_fuse_interstage.auto.Decisions` with a threshold that is chosen by counting."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rollouts import timeline

from verl_fuse.simulate.threshold import Threshold
from verl_fuse.spec.events import Generated, SetUp, StepEnded, Submitted
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import Capacity, ReplicaView, RolloutView
from verl_fuse_interstage import auto
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.migration import Trigger
from verl_fuse_interstage.plugin import InterstagePlugin

VIEWS = (ReplicaView(0, 0, 8, True, capacity=Capacity(8)), ReplicaView(1, 0, 4, True, capacity=Capacity(4, 90)))


class Counting:
    """In place of the automatic threshold: R_t is how often it was asked."""

    def __init__(self, *built, infers, streams):
        self.built, self.told, self.asked, self.decision_seconds = built, (infers, streams), [], 0.5
        self.learned_from, self.warm = [], False

    def warm_up(self):
        self.warm = True

    def learn(self, *step):
        self.learned_from.append(step)

    def choose(self, samples, each):
        self.asked.append((samples, each))
        return Threshold(len(self.asked), 1, 2.0, 3.0)


@pytest.fixture
def decided(monkeypatch):
    monkeypatch.setattr(auto, "AutoThreshold", Counting)
    found = auto.Decisions(VIEWS, 2, SimpleNamespace(prompt_length=8, response_length=24))
    found.observe(SetUp(0, 0.0, Path("run"), None, 9, 40, 10))
    return found


def view(step: int) -> RolloutView:
    return RolloutView(step, 1.0, 40, 30, 10, 0, (), ())


def test_it_is_built_for_the_engine_that_holds_least(decided):
    assert decided._auto.built == (2, Capacity(4, 90), 32)


def test_its_first_choice_does_not_wait_for_compilation(decided):
    assert decided._auto.warm


@pytest.mark.parametrize(("stages", "stream"), [((), True), (("ref",), True), (("ref",), False)])
def test_it_is_told_what_freed_devices_do(monkeypatch, stages, stream):
    monkeypatch.setattr(auto, "AutoThreshold", Counting)
    block = InterstageConfig(enabled=True, layout="slices", migration_threshold="auto")
    rollout = {"prompt_length": 8, "response_length": 24}
    config = {"actor_rollout_ref": {"rollout": rollout}, "fuse": {"update": {"stream": stream}}}
    plugin = InterstagePlugin()
    trainer = SimpleNamespace(
        block=lambda name: block,
        config=OmegaConf.create(config),
        streamed_stages=stages,
        replica_views=lambda: VIEWS,
        devices_each=2,
        add_part=lambda make: None,
        training_memory=lambda: {"actor": [RankMemory("node", 1, None, (), 1, 0, 0, 0)]},
    )
    plugin.fuse_setup(trainer=trainer)
    assert plugin._decisions is not None
    assert plugin._decisions._auto.told == (bool(stages), stream)


def test_a_step_is_decided_once_on_as_many_samples_as_it_has(decided):
    decided.observe(Submitted(1, 0.0, {"math": 7, "code": 3}))
    assert [decided.trigger(view(step)) for step in (1, 1, 2)] == [Trigger(1, 1), Trigger(1, 1), Trigger(2, 1)]
    assert decided._auto.asked == [({"math": 28, "code": 12}, 4)] * 2


def test_what_was_decided_is_told_of_its_step_alone(decided):
    decided.trigger(view(3))
    assert decided.metrics(replace(timeline(), step=2)) == {}
    assert decided.metrics(replace(timeline(), step=3)) == {
        "fuse/migration_threshold": 1.0,
        "fuse/predicted_stage_seconds": 2.0,
        "fuse/predicted_stock_seconds": 3.0,
        "fuse/threshold_decision_seconds": 0.5,
    }


def test_a_step_is_learned_with_the_tokens_of_all_its_responses(decided):
    decided.observe(Generated(1, 0.0, {"a": [3, 4]}, {"b": [5]}, {}))
    decided.observe(StepEnded(1, 0.0, timeline(), 2, {"math": [(9, 3)]}, {}))
    assert decided._auto.learned_from == [(timeline(), {"math": [(9, 3)]}, {}, 12)]
