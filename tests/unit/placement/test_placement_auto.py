"""Shows the invariants of plugins/verl_fuse_placement/auto.py, and when a run warns of a better placement."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from placed_steps import FLAT, TAIL, placed_step
from test_placement_learned import history

from verl_fuse import plugins
from verl_fuse.spec.composed import getter
from verl_fuse.spec.events import CheckpointSaved, StepEnded
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import Capacity, ReplicaView
from verl_fuse_placement.auto import LEAST_STEP_GAIN, Pool, choose, is_better, predict
from verl_fuse_placement.chosen import PlacementChoice
from verl_fuse_placement.learned import KEPT, CriticMemory, PlacementHistory

POOL = Pool(replicas=4, each=1, most=4)
COMPUTE_BOUND = {"step": 0.002, "sequence": 0.02}
CRITIC, DEFER, MOST = "fuse.placement.critic", "fuse.placement.defer", "fuse.elastic.max_replicas"


def chosen(*steps, pool=POOL) -> int:
    return choose(predict(history(*steps), pool, (1, 2)))


def test_a_large_critic_leaves_the_actor_where_long_tails_leave_devices_idle():
    predicted = predict(history(placed_step(TAIL, update=16.0)), POOL, (1, 2))
    # Two devices' update of 8 s is hidden behind a generation of 12 s, one device's of 16 s is not.
    assert choose(predicted) == 2
    assert predicted[2] < 0.85 * predicted[0] < predicted[0] < predicted[1]
    timeline, _ = placed_step(TAIL, update=16.0)
    assert predicted[0] == pytest.approx(timeline.end), "the step as it was"


def test_the_critic_stays_where_decoding_is_compute_bound():
    assert chosen(placed_step(FLAT, update=16.0, **COMPUTE_BOUND)) == 0


def test_the_critic_stays_where_it_is_small_or_nothing_was_measured():
    assert chosen(placed_step(TAIL, update=0.2)) == 0
    assert predict(history(), POOL, (1, 2)) == {}
    assert choose({}) == 0


def test_knowledge_of_another_number_of_replicas_is_none():
    assert predict(history(placed_step(TAIL, update=16.0)), Pool(8, 1, 8), (1, 2)) == {}


@pytest.mark.parametrize(("beside", "apart"), [(10.0, 10 * (1 - LEAST_STEP_GAIN) - 1e-9), (10.0, 9.9)])
def test_less_than_the_least_gain_changes_nothing(beside, apart):
    enough = apart < beside * (1 - LEAST_STEP_GAIN)
    assert choose({0: beside, 1: apart}) == int(enough)
    assert is_better({0: beside, 1: apart}, 1, 0) is enough
    assert not is_better({0: beside}, 0, 0)


@pytest.mark.parametrize("critic", [range(3, 4), range(2, 4)], ids=str)
def test_a_step_on_devices_of_its_own_foretells_both(critic):
    """The seconds of each placement do not depend on the placement that was measured."""
    beside = history(placed_step(TAIL, update=16.0))
    apart = history(placed_step(TAIL, update=16.0, critic=critic, replicas=4 - len(critic)))
    measured_beside, measured_apart = (predict(known, POOL, (1, 2)) for known in (beside, apart))
    assert measured_apart == pytest.approx(measured_beside, rel=0.05)
    timeline, _ = placed_step(TAIL, update=16.0, critic=critic, replicas=4 - len(critic))
    assert measured_apart[len(critic)] == pytest.approx(timeline.end), "the step as it was"


def test_values_that_are_streamed_are_hidden_behind_the_update():
    known = history(placed_step(TAIL, update=10.0, values=4.0))
    after = predict(known, POOL, (2,))
    rows, parts = known.steps[0]
    known.steps[0] = rows, replace(parts, late=1.0)
    assert predict(known, POOL, (2,))[2] == pytest.approx(after[2] - 3.0 / 2)
    # Behind an update that is longer than generation they are beside nothing.
    late = rows, replace(parts, update=30.0)
    streamed = rows, replace(parts, update=30.0, late=1.0)
    seconds = []
    for step in (late, streamed):
        known.steps[0] = step
        seconds.append(predict(known, POOL, (2,))[2])
    assert seconds[1] == pytest.approx(seconds[0])


def test_a_critic_that_does_not_fit_is_no_candidate():
    known = history(placed_step(TAIL, update=16.0))
    known.memory = CriticMemory(parameters=10**9, device=40 << 30)
    # 16 GB of state: on one device they fit beside an engine that takes half of it, not beside one that takes 0.7.
    assert predict(known, Pool(4, 1, 4, engine=0.5), (1, 2)).keys() == {0, 1, 2}
    assert predict(known, Pool(4, 1, 4, engine=0.7), (1, 2)).keys() == {0, 2}
    known.memory = CriticMemory(parameters=10**9, device=32 * 10**9)
    assert predict(known, Pool(4, 1, 4, engine=0.5), (1, 2)).keys() == {0, 1, 2}, "to the last byte"
    known.memory = CriticMemory(parameters=10**12, device=None)
    assert predict(known, Pool(4, 1, 4, engine=0.7), (1, 2)).keys() == {0, 1, 2}


def test_replicas_that_may_not_generate_anyway_cost_nothing():
    few = Pool(replicas=4, each=1, most=2)
    found = predict(history(placed_step(TAIL, update=16.0, replicas=2)), few, (1, 2))
    assert found[2] == pytest.approx(found[0] - 16 / 4 - 1 / 4 + 1 / 2), "the update is hidden, values take longer"


def composed(folder, **changes):
    config = OmegaConf.create(
        {
            "trainer": {
                "v1": {"trainer_mode": "fuse"},
                "nnodes": 1,
                "n_gpus_per_node": 4,
                "device": "cpu",
                "resume_mode": "auto",
                "default_local_dir": str(folder),
            },
            "algorithm": {"adv_estimator": "gae"},
            "critic": {"strategy": "fsdp2", "ppo_mini_batch_size": 8},
            "actor_rollout_ref": {"rollout": {"n": 1}},
            "fuse": {"placement": {"critic": "auto"}, "elastic": {"enabled": True}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def saved(folder, known: PlacementHistory):
    """A checkpoint of step 4 with this knowledge."""
    checkpoint = folder / "global_step_4"
    checkpoint.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    known.save(checkpoint, devices=1)
    return checkpoint


def overrides(config, folder):
    (found,) = [f for f in plugins.load().hook.fuse_overrides(config=config, run_dir=folder) if f and CRITIC in f]
    return found


def test_a_new_run_has_its_critic_beside_the_actor(tmp_path):
    assert overrides(composed(tmp_path), tmp_path) == {CRITIC: None, DEFER: False}


def test_a_run_that_goes_on_chooses_by_what_its_checkpoint_knows(tmp_path):
    saved(tmp_path, history(placed_step(TAIL, update=16.0)))
    wanted = {CRITIC: {"first": 2, "devices": 2}, DEFER: True, MOST: 2}
    assert overrides(composed(tmp_path), tmp_path) == wanted
    assert overrides(composed(tmp_path, **{MOST: 1}), tmp_path) == wanted | {MOST: 1}
    stays = {CRITIC: None, DEFER: False}
    assert overrides(composed(tmp_path, **{"trainer.resume_mode": "disable"}), tmp_path) == stays
    assert overrides(composed(tmp_path, **{"trainer.n_gpus_per_node": 8}), tmp_path) == stays
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "global_step_4")}
    assert overrides(composed(tmp_path / "other", **path), tmp_path) == wanted


def test_what_the_run_cannot_have_is_no_candidate(tmp_path):
    saved(tmp_path, history(placed_step(TAIL, update=10.0)))
    assert overrides(composed(tmp_path), tmp_path)[CRITIC] == {"first": 2, "devices": 2}
    one = overrides(composed(tmp_path, **{"critic.ppo_mini_batch_size": 3}), tmp_path)
    assert one == {CRITIC: {"first": 3, "devices": 1}, DEFER: True, MOST: 3}
    assert overrides(composed(tmp_path, **{"fuse.elastic.min_replicas": 3}), tmp_path) == one


def test_the_pool_generates_on_as_many_replicas_as_the_run_may(tmp_path):
    most = {2: 2, 9: 4, None: 4}
    found = {asked: PlacementChoice(getter(composed(tmp_path, **{MOST: asked})), None).pool.most for asked in most}
    assert found == most


def test_a_run_of_other_replicas_learns_of_its_own(tmp_path):
    folder = saved(tmp_path, history(placed_step(TAIL, update=16.0)))
    run = PlacementChoice(getter(composed(tmp_path, **{"trainer.n_gpus_per_node": 8})), folder)
    assert (run.learned.replicas, list(run.learned.steps), run.learned.decode) == (8, [], None)


def test_a_run_measures_the_engine_that_holds_least_and_the_critic_of_its_first_rank(tmp_path, caplog):
    capacities = Capacity(64, 4096.0), Capacity(32, 1024.0), Capacity(64)
    trainer = SimpleNamespace(
        replica_views=lambda: tuple(ReplicaView(n, 0, 8, True, capacity=one) for n, one in enumerate(capacities)),
        training_memory=lambda: {"critic": [RankMemory("node", 1, 80, (3, 4), 1, 0, 0, 0)]},
    )
    run = PlacementChoice(getter(composed(tmp_path)), None)
    with caplog.at_level(logging.INFO):
        run.set_up(trainer)
    assert (run.learned.capacity, run.learned.memory) == (Capacity(32, 1024.0), CriticMemory(7, 80))
    assert "critic=auto: the critic is beside the actor; no step of this run has been measured yet" in caplog.text


def test_devices_that_are_set_are_left_as_they_are(tmp_path):
    config = composed(tmp_path, **{CRITIC: {"first": 3, "devices": 1}})
    assert all(not found for found in plugins.load().hook.fuse_overrides(config=config, run_dir=tmp_path))


def test_a_better_placement_is_told_once_and_taken_by_the_next_start(tmp_path, caplog):
    run = PlacementChoice(getter(composed(tmp_path)), None)
    run.learned.capacity = history().capacity
    assert (run.apart, run.metrics()) == (0, {"fuse/placement_devices": 0.0})
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3, 4):
            timeline, lengths = placed_step(TAIL, update=16.0, number=number)
            run.observe(StepEnded(number, 0.0, timeline, 32, lengths, {}))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "after step 2" in warning
    assert "this run goes on with the critic beside the actor, a restart from a checkpoint would take it" in warning
    assert "on devices 2 to 3" in warning
    run.observe(CheckpointSaved(4, 0.0, tmp_path))
    again = PlacementChoice(getter(composed(tmp_path)), tmp_path)
    assert again.apart == 2
    assert again.metrics() == {"fuse/placement_devices": 2.0, "fuse/placement_predicted_seconds": again.predicted[2]}
    assert len(KEPT.load(tmp_path, devices=1).steps) == 3
