"""Shows the invariants and the refusals of `verl_fuse_realloc.schedule`."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse_realloc.plugin import ReallocPlugin
from verl_fuse_realloc.schedule import LayoutSchedule

PLUGIN = ReallocPlugin()
ACTOR, CRITIC = "actor_rollout_ref.actor.fsdp_config.fsdp_size", "critic.fsdp.fsdp_size"


def engine(**changes) -> dict:
    return {
        "fsdp_size": -1,
        "ulysses_sequence_parallel_size": 1,
        "offload_policy": False,
        "qat": {"enable": False},
    } | changes


def composed(schedule, **changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}, "nnodes": 2, "n_gpus_per_node": 4},
            "algorithm": {"adv_estimator": "gae"},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2", "fsdp_config": engine()}, "model": {"lora_rank": 0}},
            "critic": {"enable": None, "strategy": "fsdp2", "fsdp": engine(fsdp_size=4), "model": {"lora_rank": 0}},
            "fuse": {"realloc": {"weight_sync": "stock", "schedule": schedule}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(schedule, **changes) -> list[tuple]:
    return [(r.key, r.value) for r in PLUGIN.fuse_validate(config=composed(schedule, **changes)) or ()]


def read(config) -> LayoutSchedule:
    return LayoutSchedule.read(lambda key: OmegaConf.select(config, key))


def plan(file: Path, **overrides) -> str:
    calls = tuple(CallPlan(name, Mesh(0, 8), Layout(dp=8)) for name in ("actor_generate", "actor_train"))
    Plan(calls, strategy="fsdp", overrides={key.replace("__", "."): value for key, value in overrides.items()}).write(
        file
    )
    return str(file)


def test_a_step_keeps_what_an_earlier_entry_said_and_begins_with_the_configuration():
    config = composed({5: {"actor": {"fsdp_size": 8}}, 3: {"actor": {"fsdp_size": 2}, "critic": {"fsdp_size": 1}}})
    assert refused({3: {"actor": {"fsdp_size": 2}}}) == []
    schedule = read(config)
    assert [schedule.wanted(step) for step in (1, 2, 3, 4, 5, 99)] == [
        {"actor": -1, "critic": 4},
        {"actor": -1, "critic": 4},
        {"actor": 2, "critic": 1},
        {"actor": 2, "critic": 1},
        {"actor": 8, "critic": 1},
        {"actor": 8, "critic": 1},
    ]
    alone = read(composed({3: {"actor": {"fsdp_size": 2}}}))
    assert alone.wanted(1) == {"actor": -1}, "a model that no entry names is left alone"


@pytest.mark.parametrize("size", [-1, 1, 8])
def test_shards_may_be_of_all_ranks_of_all_nodes(size):
    assert refused({2: {"actor": {"fsdp_size": size}}}) == []


def test_without_a_schedule_the_plugin_takes_no_part():
    config = composed(None)
    assert PLUGIN.fuse_validate(config=config) == []
    assert PLUGIN.fuse_contracts(config=config) == ()
    assert plugins.load().hook.fuse_worker_class(model="critic", base=object, config=config) is None


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ({1: {"actor": {"fsdp_size": 2}}}, "1"),
        ({"late": {"actor": {"fsdp_size": 2}}}, "late"),
        ({3: {}}, "3"),
        ({3: {"reference": {"fsdp_size": 2}}}, "3"),
        ({3: {"actor": 2}}, "3.actor"),
        ({3: {"actor": {"size": 2}}}, "3.actor"),
        ({3: {"actor": {"fsdp_size": 3}}}, "3.actor.fsdp_size"),
        ({3: {"actor": {"fsdp_size": 0}}}, "3.actor.fsdp_size"),
        ({3: {"actor": {"fsdp_size": "2"}}}, "3.actor.fsdp_size"),
        ({3: "no_such_plan.json"}, "3"),
    ],
)
def test_an_entry_that_cannot_be_is_named(schedule, key):
    assert [found for found, _ in refused(schedule)] == [f"fuse.realloc.schedule.{key}"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("actor_rollout_ref.actor.strategy", "fsdp"),
        ("critic.strategy", "megatron"),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 2),
        ("critic.fsdp.offload_policy", True),
        ("critic.fsdp.qat.enable", True),
        ("actor_rollout_ref.model.enable_activation_offload", True),
        ("actor_rollout_ref.model.lora_rank", 8),
    ],
)
def test_what_a_change_does_not_know_is_refused(key: str, value: object):
    schedule = {3: {"actor": {"fsdp_size": 2}, "critic": {"fsdp_size": 2}}}
    assert refused(schedule, **{key.replace(".", "__"): value}) == [(key, value)]


def test_a_model_that_is_not_named_may_be_anything():
    schedule = {3: {"actor": {"fsdp_size": 2}}}
    assert refused(schedule, critic__strategy="megatron") == []
    assert refused({3: {"critic": {"fsdp_size": 2}}}, critic__enable=False) == [("fuse.realloc.schedule", "critic")]


def test_a_plan_file_changes_the_sizes_it_sets_and_nothing_else(tmp_path: Path):
    sizes = {"actor_rollout_ref__actor__fsdp_config__fsdp_size": 4, "critic__fsdp__fsdp_size": 2}
    file = plan(tmp_path / "plan.json", trainer__nnodes=2, **sizes)
    schedule = {3: {"actor": {"fsdp_size": 2}}, 4: file}
    assert refused(schedule) == []
    assert read(composed(schedule)).wanted(4) == {"actor": 4, "critic": 2}
    other = plan(tmp_path / "other.json", trainer__nnodes=1, actor_rollout_ref__rollout__n=8, critic__fsdp__fsdp_size=3)
    (change, size) = PLUGIN.fuse_validate(config=composed({4: other})) or ()
    assert str(change).endswith("this plan also sets trainer.nnodes, actor_rollout_ref.rollout.n")
    assert (size.key, size.value) == ("fuse.realloc.schedule.4.critic.fsdp_size", 3)


def test_a_plan_file_is_compared_with_the_plan_that_the_run_begins_with(tmp_path: Path):
    first = plan(tmp_path / "first.json", actor_rollout_ref__rollout__n=8)
    then = plan(tmp_path / "then.json", actor_rollout_ref__rollout__n=8, critic__fsdp__fsdp_size=2)
    assert refused({4: then}) == [("fuse.realloc.schedule.4", then)]
    assert refused({4: then}, fuse__plan=first) == []
