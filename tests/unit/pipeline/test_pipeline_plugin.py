"""Refusals of the plugin `pipeline`, and its choice of a schedule."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse_pipeline.config import PipelineConfig
from verl_fuse_pipeline.plugin import PipelinePlugin
from verl_fuse_pipeline.policy import fused_schedule, serial_seconds

PLUGIN = PipelinePlugin()
ENGINE = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "context_parallel_size": 1}


def composed(**changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}, "nnodes": 1, "n_gpus_per_node": 4},
            "algorithm": {"adv_estimator": "gae"},
            "actor_rollout_ref": {"actor": {"strategy": "megatron", "megatron": ENGINE}, "hybrid_engine": True},
            "critic": {"enable": None, "strategy": "megatron", "megatron": ENGINE},
            "fuse": {"pipeline": {"enabled": True, "schedule": "auto"}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(**changes) -> list[tuple]:
    return [(r.key, r.value) for r in PLUGIN.fuse_validate(config=composed(**changes)) or ()]


def test_what_fits_is_not_refused_and_off_asks_nothing():
    assert refused() == []
    assert refused(critic__megatron__pipeline_model_parallel_size=2) == []
    off = composed(fuse__pipeline__enabled=False, actor_rollout_ref__actor__strategy="fsdp2")
    assert PLUGIN.fuse_validate(config=off) == []
    assert PLUGIN.fuse_contracts(config=off) == ()
    assert PLUGIN.fuse_worker_class(model="critic", base=object, config=off) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.adv_estimator", "grpo"),
        ("actor_rollout_ref.actor.strategy", "fsdp2"),
        ("critic.strategy", "fsdp2"),
        ("critic.megatron.virtual_pipeline_model_parallel_size", 2),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", 2),
        ("actor_rollout_ref.actor.megatron.dynamic_context_parallel", True),
        ("actor_rollout_ref.actor.megatron.qat.enable", True),
        ("actor_rollout_ref.actor.megatron.router_replay.mode", "R2"),
        ("critic.megatron.override_transformer_config.fp8", "e4m3"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.defer_embedding_wgrad_compute", True),
        ("critic.megatron.override_transformer_config.fine_grained_activation_offloading", True),
        (
            "critic.megatron.override_transformer_config.num_microbatches_with_partial_activation_checkpoints",
            2,
        ),
        ("critic.megatron.pipeline_model_parallel_size", 1),
        ("actor_rollout_ref.model.lora_rank", 8),
        ("actor_rollout_ref.model.mtp.enable", True),
        ("critic.model.lora.rank", 8),
        ("global_profiler.steps", [1]),
        ("actor_rollout_ref.hybrid_engine", False),
    ],
)
def test_what_cannot_run_fused_is_refused_by_name(key, value):
    assert refused(**{key.replace(".", "__"): value}) == [(key, value)]


def test_a_run_without_a_critic_is_told_of_its_engines_too():
    found = refused(
        algorithm__adv_estimator="grpo", critic__strategy="fsdp2", actor_rollout_ref__actor__strategy="fsdp"
    )
    assert found == [
        ("algorithm.adv_estimator", "grpo"),
        ("actor_rollout_ref.actor.strategy", "fsdp"),
        ("critic.strategy", "fsdp2"),
    ]


WIDE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LONG = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}


def test_stages_of_different_widths_and_sizes_that_do_not_divide_the_ranks_are_refused():
    key = "critic.megatron.tensor_model_parallel_size"
    assert refused(critic__megatron=WIDE) == [(key, 2)]
    assert refused(actor_rollout_ref__actor__megatron=WIDE) == [(key, 1)]
    assert refused(actor_rollout_ref__actor__megatron=LONG) == [(key, 1)]
    assert refused(actor_rollout_ref__actor__megatron=LONG, critic__megatron=WIDE) == []
    assert refused(critic__megatron__pipeline_model_parallel_size=3) == [
        ("critic.megatron.pipeline_model_parallel_size", 3)
    ]


def test_serial_training_in_layouts_of_their_own_may_have_any_sizes():
    assert (
        refused(
            fuse__pipeline__schedule="serial",
            critic__megatron__pipeline_model_parallel_size=1,
            global_profiler__steps=[1],
        )
        == []
    )


def test_ranks_of_all_nodes_count():
    nodes = {"trainer__nnodes": 2, "trainer__n_gpus_per_node": 2}
    assert refused(**nodes) == []
    assert refused(**nodes, critic__megatron__pipeline_model_parallel_size=8) == [
        ("critic.megatron.pipeline_model_parallel_size", 8)
    ]


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("block", "asked"),
    [
        (PipelineConfig(), []),
        (PipelineConfig(enabled=True, schedule="serial"), []),
        (PipelineConfig(enabled=True, schedule="fused", solve_seconds=3.0, timeout=70.0), [("fused", 3.0, 70.0)]),
    ],
)
def test_a_fused_update_is_set_up_with_its_limits_of_time(block, asked):
    pytest.importorskip("verl")
    pytest.importorskip("greenlet")
    parts, host = [], SimpleNamespace(run_stage=None)
    trainer = SimpleNamespace(block=lambda plugin: block, add_part=lambda make: parts.append(make(host, {})))
    PLUGIN.fuse_setup(trainer=trainer)
    solves = [part._schedules._solve.keywords for part in parts]
    told = [(solve["wanted"], solve["seconds"], part._timeout) for solve, part in zip(solves, parts, strict=True)]
    assert told == asked


def two_models(critic: float) -> ScheduleProblem:
    actor = Pipeline("actor", range(4), 4, 1.0, 2.0, 1.0)
    return ScheduleProblem(4, (actor, Pipeline("critic", (3, 2, 1, 0), 4, critic, 2 * critic, 1.0)))


def test_a_fused_schedule_is_taken_where_it_is_predicted_to_be_faster():
    problem = two_models(1.0)
    schedule = fused_schedule(problem, "auto", 5.0)
    assert serial_seconds(problem) == 42.0
    assert schedule.makespan == 27.0


def test_without_a_gain_there_is_none_unless_it_is_asked_for():
    # Copies that share no rank in time: as many micro-batches that the bubbles are nothing.
    problem = ScheduleProblem(
        1, (Pipeline("actor", (0,), 2, 1.0, 2.0, 1.0), Pipeline("critic", (0,), 2, 1.0, 2.0, 1.0))
    )
    assert fused_schedule(problem, "auto", 1.0) is None
    assert fused_schedule(problem, "fused", 1.0).makespan == 12.0
