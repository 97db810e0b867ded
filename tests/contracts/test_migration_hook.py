"""`fuse_migration` and `fuse_infer_next` through the manager: the built-in policies decide, a stranger's replace them
(when the tail moves, where to, what a lane runs next), a broken one costs the step's optimisation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.events import CheckpointSaved, SetUp, StepBegun, StepEnded
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import Migration, RequestView, Stage
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.testing import SetUpTrainer, lane, replicas, samples
from verl_fuse.testing import view as seen
from verl_fuse_interstage.plugin import InterstagePlugin

STRANGER = """
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.step import Migration

HOOK_API = 2


@hookimpl
def fuse_migration(view):
    if view.unfinished == 1:
        return Migration(survivors=(9,))
    # Keeps the idlest replica, and never waits.
    return Migration(survivors=(min(view.replicas, key=lambda replica: replica.running).rank,))
"""

SHORTEST_FIRST = """
from verl_fuse.hookspecs import hookimpl

HOOK_API = 2


@hookimpl
def fuse_infer_next(view, lane):
    ranked = sorted(view.ready, key=lambda sample: sample.seq_len)
    return [sample.key for sample in ranked[:1]] or None
"""


def view(unfinished):
    return seen(step=2, expected=40, finished=40 - unfinished, replicas=replicas((1, 5, 3)))


def set_up(settings: Any, stages: tuple[Stage, ...] = ("old_log_prob", "ref"), **more: Any) -> list[str]:
    """Set the plugins up with a trainer whose models have no parameters; return the parts that they add."""
    memory = {model: [RankMemory("node 0", 1, None, (), 1, 0, 0, 0)] for model in ("actor", "critic")}
    trainer = SetUpTrainer(blocks=settings.blocks, streamed_stages=stages, **{"memory": memory, **more})
    settings.manager.hook.fuse_setup(trainer=trainer)
    assert {name for name, _ in trainer.used} <= {"add_part"}
    makers = [arguments["make"] for _, arguments in trainer.used]
    assert all(make.keywords == {"stages": stages, "share_prompts": False} for make in makers)
    return [make.func.__name__ for make in makers]


def policies() -> PolicyGuard:
    block = {"interstage": {"enabled": True, "layout": "slices", "migration_threshold": 0.25}}
    config = {"trainer": {"v1": {"trainer_mode": "fuse"}}, "fuse": {"disabled_plugins": ["observe"], **block}}
    settings = load_settings(OmegaConf.create(config))
    set_up(settings)
    return PolicyGuard(settings.manager.hook)


def test_the_built_in_policy_keeps_the_busiest_replicas_once_the_tail_is_short():
    policy = policies()
    assert policy.migration(view(11)) is None
    assert policy.migration(view(10)) == Migration(survivors=(1, 2))
    assert policy.migration(view(8)) == Migration(survivors=(1,))


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("block", "stages", "said"),
    [
        # A KL penalty and a critic are off, and log-probs come from the rollout.
        ({"layout": "slices", "migration_threshold": 0.25}, (), "fuse.interstage.enabled=true: nothing can be streamed"),
        ({"layout": "slices", "migration_threshold": "auto"}, (), "fuse.interstage.enabled=true: nothing can be streamed"),
        ({}, (), "fuse.interstage.enabled=true: nothing can be streamed"),
        ({"migration_threshold": 12}, ("ref",), "fuse.interstage.migration_threshold=12: nothing migrates while"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_where_nothing_can_be_gained_nothing_moves_and_that_is_said_once_at_start(block, stages, said, caplog):
    config = {"trainer": {"v1": {"trainer_mode": "fuse"}}, "fuse": {"interstage": {"enabled": True, **block}}}
    settings = load_settings(OmegaConf.create(config))
    built = set_up(settings, stages)
    policy = PolicyGuard(settings.manager.hook)
    assert [policy.migration(view(unfinished)) for unfinished in (12, 10, 8, 1)] == [None] * 4
    streamed = policy.infer_next(replace(view(10), ready=samples(range(1, 9))), lane(stages=stages))
    assert (streamed is not None) == bool(stages), "samples are streamed wherever they can be"
    assert built == []
    assert policy.fallbacks == 0
    assert [record.levelname for record in caplog.records if record.message.startswith(said)] == ["WARNING"]


def test_with_streamed_updates_the_tail_moves_though_nothing_is_inferred(caplog):
    block = {"interstage": {"enabled": True, "layout": "slices", "migration_threshold": 0.25}}
    config = {"trainer": {"v1": {"trainer_mode": "fuse"}}, "fuse": {"disabled_plugins": ["update"], **block}}
    settings = load_settings(OmegaConf.create(config))
    # No copy is built, so nobody asks for memory.
    built = set_up(settings, (), config={"fuse.update.stream": True}, memory=None)
    policy = PolicyGuard(settings.manager.hook)
    assert policy.migration(view(11)) is None
    assert policy.migration(view(8)) == Migration(survivors=(1,))
    assert policy.infer_next(replace(view(10), ready=samples(range(1, 9))), lane(stages=())) is None
    assert (built, policy.fallbacks) == ([], 0)
    assert not any("nothing can be streamed" in message for message in caplog.messages)


def test_slices_without_memory_for_their_copies_are_refused_before_they_are_built():
    config = {
        "trainer": {"v1": {"trainer_mode": "fuse"}},
        "fuse": {"interstage": {"enabled": True, "layout": "slices"}},
    }
    config = OmegaConf.create(config)
    settings = load_settings(config)
    rank = RankMemory("node 0", 10 * 2**30, 80 * 2**30, (2**32,), 1, 0, 0, 0)
    trainer = SetUpTrainer(config=config, blocks=settings.blocks, memory={"actor": [rank]})
    with pytest.raises(FuseError, match=r"copies of 2 models for 1 devices of node node 0 keep 16\.0 GiB of host"):
        settings.manager.hook.fuse_setup(trainer=trainer)
    assert trainer.used == []
    config.actor_rollout_ref = {"actor": {"strategy": "megatron"}}
    trainer = SetUpTrainer(config=config, blocks=settings.blocks, memory={"actor": [replace(rank, stage=0)]})
    with pytest.raises(FuseError, match=r"copies of 2 models for 1 devices of node node 0 keep 16\.0 GiB of host"):
        settings.manager.hook.fuse_setup(trainer=trainer)
    assert trainer.used == []
    # For layout `shared` Megatron's ranks are not asked, and ranks of an engine that is not known never are.
    settings.blocks["interstage"] = replace(settings.blocks["interstage"], layout="shared")
    assert set_up(settings, config=config, memory=None) == []
    settings.blocks["interstage"] = replace(settings.blocks["interstage"], layout="slices")
    config.critic, config.algorithm = {"strategy": "veomni"}, {"adv_estimator": "gae"}
    assert set_up(settings, config=config, memory=None) == ["slices"]


def test_a_tail_that_has_nowhere_to_go_is_told_once_a_step_and_counted(caplog):
    policy = policies()
    hook = policy._hook

    def measured():
        return {
            name: value
            for found in hook.fuse_metrics(timeline=Timeline("run", 2, 0.0, 9.0, ()))
            for name, value in found.items()
        }

    crowded = view(10)
    crowded = replace(crowded, replicas=tuple(replace(seen, slots=3) for seen in crowded.replicas))
    stuck = replace(crowded, replicas=tuple(replace(seen, unmovable=1) for seen in view(10).replicas))
    with caplog.at_level("INFO"):
        assert [policy.migration(seen) for seen in (crowded, crowded, stuck, stuck)] == [None] * 4
    told = [record.getMessage() for record in caplog.records]
    key = "fuse.interstage.migration_threshold"
    start = f"step 2: the last 10 samples stay where they are, though {key} asks for fewer replicas: replica 0 "
    assert [message.startswith(start) for message in told] == [True, True]
    assert "replica 1 has room for 3" in told[0]
    assert "replica 1 runs 1 that cannot move" in told[1]
    assert measured()["fuse/tail_without_room"] == 1
    hook.fuse_event(event=StepBegun(3, 10.0))
    assert measured()["fuse/tail_without_room"] == 0


def test_requests_that_moved_that_could_not_and_that_started_again_are_counted():
    hook = policies()._hook
    whole = {"prompt_tokens": 9, "response_tokens": 30, "stop_reason": "completed"}
    kinds = [
        {**whole, "stop_reason": "aborted"},
        {**whole, "prompt_tokens": 39, "cached_tokens": 16, "resumed_tokens": 30},
        {**whole, "unmovable": "seed", "stop_reason": "aborted"},
        {**whole, "unmovable": "seed", "stop_reason": "aborted", "response_tokens": 0},
        {**whole, "unmovable": "seed"},
        {**whole, "unmovable": "stop"},
    ]
    spans = tuple(Span("request", "replica 0", "generate", 0.0, 3.0, args) for args in kinds)
    metrics = {}
    for found in hook.fuse_metrics(timeline=Timeline("run", 1, 0.0, 9.0, spans)):
        metrics |= found
    names = ("migrations", "reprefilled_tokens", "unmovable_requests", "restarted_requests")
    assert [metrics[f"fuse/{name}"] for name in names] == [1, 23, 2, 1]


def test_a_stranger_s_policy_is_asked_first(installed_plugin):
    installed_plugin("acme", STRANGER)
    assert policies().migration(view(30)) == Migration(survivors=(0,))


def test_a_stranger_decides_what_a_lane_runs_next(installed_plugin):
    seen, slice = replace(view(10), ready=samples([30, 8, 12])), lane(name="slice 1", released=True)
    assert policies().infer_next(seen, slice) == ["g0_0_0", "g2_0_0", "g1_0_0"]
    installed_plugin("acme", SHORTEST_FIRST)
    assert policies().infer_next(seen, slice) == ["g1_0_0"]


def test_a_stranger_s_mistake_leaves_the_requests_where_they_are(installed_plugin, caplog):
    installed_plugin("acme", STRANGER)
    policy = policies()
    assert policy.migration(view(1)) is None
    assert policy.fallbacks == 1
    assert "fuse_migration returned survivors [9]" in caplog.text


def test_the_hook_itself_answers_with_the_first_result(installed_plugin):
    installed_plugin("acme", STRANGER)
    settings = load_settings(OmegaConf.create({"fuse": {}}))
    set_up(settings)
    assert settings.manager.hook.fuse_migration(view=view(20)) == Migration(survivors=(0,))


def measured_step() -> tuple[Timeline, list[tuple[int, int]]]:
    """Forty samples on three replicas, four of them ten times as long, 0.1 s per token, and 60 s of
    inference on slices afterwards."""
    lengths = [10] * 36 + [100] * 4
    spans = [Span("gen", "step", "stage", 0.0, 10.0)]
    for number, length in enumerate(lengths):
        args = {"prompt_tokens": 4, "response_tokens": length, "stop_reason": "completed"}
        start = 1e-6 * number
        spans.append(Span("request", f"replica {number % 3}", "generate", start, start + 0.1 * length, args))
    for slice in range(3):
        spans.append(
            Span("micro-group", f"lane slice {slice}", "inference", 10.0, 30.0, {"micro_group": slice, "samples": 13})
        )
    return Timeline("run", 1, 0.0, 40.0, tuple(spans)), {"math": [(4, length) for length in lengths]}


def automatic():
    """Return hooks of a run with an automatic threshold, and the calls of its trainer."""
    block = {"interstage": {"enabled": True, "migration_threshold": "auto", "layout": "slices"}}
    rollout = {"prompt_length": 8, "response_length": 120}
    config = {
        "trainer": {"v1": {"trainer_mode": "fuse"}},
        "fuse": {"disabled_plugins": ["observe"], **block},
        "actor_rollout_ref": {"rollout": rollout},
    }
    config = OmegaConf.create(config)
    settings = load_settings(config)
    used = set_up(settings, config=config, replicas=view(40).replicas, devices_each=2)
    return settings.manager.hook, used


def begin(hook, step: int = 0, resumed_from: Path | None = None) -> None:
    hook.fuse_event(event=SetUp(step, 0.0, Path("run"), resumed_from, total_steps=9, expected=40, groups=10))


def end_steps(hook, *steps: int, cold: int = 0) -> None:
    """Steps end, of which step `cold` took five times as long."""
    for number in steps:
        timeline, lengths = measured_step()
        slow = 5.0 if number == cold else 1.0
        spans = [replace(span, start=slow * span.start, end=slow * span.end) for span in timeline.spans]
        timeline = Timeline("run", number, 0.0, slow * 40.0, tuple(spans))
        hook.fuse_event(event=StepEnded(number, 40.0, timeline, samples=40, lengths=lengths, metrics={}))


def decisions(hook, step: int) -> list[Migration | None]:
    """With 39 to 1 samples left."""
    return [hook.fuse_migration(view=replace(view(left), step=step)) for left in range(39, 0, -1)]


def metrics_of(hook, step: int) -> dict[str, float]:
    metrics = {}
    for found in hook.fuse_metrics(timeline=replace(measured_step()[0], step=step)):
        metrics |= found or {}
    return metrics


def test_the_automatic_threshold_watches_a_warm_step_and_decides_the_next(caplog):
    caplog.set_level("INFO")
    hook, groups = automatic()
    begin(hook)
    assert groups == ["slices"]
    assert decisions(hook, 1) == [None] * 39
    metrics_of(hook, 1)
    end_steps(hook, 1, cold=1)
    assert decisions(hook, 2) == [None] * 39, "what step 1 took is no cost"
    assert "fuse/migration_threshold" not in metrics_of(hook, 2)
    assert (
        "step 1: migration threshold 0, not all of generation and inference has been measured yet" in caplog.messages[0]
    )
    assert caplog.messages[1].startswith("step 2: migration threshold 0, not all of generation and inference has")
    end_steps(hook, 2)
    decided = decisions(hook, 3)
    assert decided[0] is None
    assert decided[-1] is not None
    metrics = metrics_of(hook, 3)
    threshold = metrics["fuse/migration_threshold"]
    assert [left for left in range(39, 0, -1) if decided[39 - left]] == list(range(int(threshold), 0, -1))
    assert metrics["fuse/predicted_stage_seconds"] < metrics["fuse/predicted_stock_seconds"]
    assert metrics["fuse/stage_seconds"] == 30.0
    assert metrics["fuse/predicted_stock_seconds"] < 60.0, "the first step's 150 s are not in it"
    (told,) = caplog.messages[2:]
    assert told == (
        f"step 3: migration threshold {threshold:.0f}, on {len(decided[-1].survivors)} replicas; generation and "
        "inference "
        f"{metrics['fuse/predicted_stage_seconds']:.2f} s predicted ({metrics['fuse/predicted_stock_seconds']:.2f} s "
        "without migration), 30.00 s measured"
    )


def test_the_run_that_goes_on_decides_its_first_step_on_what_the_checkpoint_knows(tmp_path):
    hook, _ = automatic()
    begin(hook)
    end_steps(hook, 1, 2, cold=1)
    hook.fuse_event(event=CheckpointSaved(3, 0.0, tmp_path))
    wanted = decisions(hook, 3)
    assert any(wanted)

    hook, _ = automatic()
    begin(hook, 3, resumed_from=tmp_path)
    assert decisions(hook, 4) == wanted
    end_steps(hook, 4, cold=4)
    metrics_of(hook, 4)
    decisions(hook, 5)
    assert metrics_of(hook, 5)["fuse/predicted_stock_seconds"] < 60.0, "its own first step was cold again"
    file = tmp_path / "fuse_interstage.json"
    file.write_text(file.read_text()[:-9])
    with pytest.raises(FuseError, match=r"fuse_interstage\.json: not what fuse\.interstage writes with a checkpoint"):
        begin(hook, 3, resumed_from=tmp_path)


TELLING = """
from verl_fuse.hookspecs import hookimpl

HOOK_API = 2


@hookimpl
def fuse_transfer(request, config):
    return {"from": request.source} if request.generated else None
"""


def test_a_connector_is_told_the_weights_and_by_a_stranger_what_it_likes(installed_plugin):
    interstage = {
        "enabled": True,
        "kv_transfer_params": {"tag": "w{weights}", "all": [{"of": "{weights}"}], "pin": True},
    }
    config = OmegaConf.create({"fuse": {"interstage": interstage}})
    first, later = RequestView("r", "3", 20), RequestView("r", "3", 30, generated=10, source=1)
    told = [plugins.load().hook.fuse_transfer(request=one, config=config) for one in (first, later)]
    assert told == [{"tag": "w3", "all": [{"of": "3"}], "pin": True}] * 2
    installed_plugin("telling", TELLING)
    told = [plugins.load().hook.fuse_transfer(request=one, config=config) for one in (first, later)]
    assert told == [{"tag": "w3", "all": [{"of": "3"}], "pin": True}, {"from": 1}]


def test_a_connector_that_is_told_nothing_about_weights_is_refused_by_name():
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {
                "rollout": {"engine_kwargs": {"vllm": {"kv_transfer_config": {"kv_role": "kv_both"}}}}
            },
            "fuse": {"interstage": {"enabled": True, "kv_transfer_params": None}},
        }
    )
    (refused,) = [
        found for found in InterstagePlugin().fuse_validate(config=config) if "kv_transfer_config" in found.key
    ]
    assert "fuse.interstage.kv_transfer_params" in str(refused)
    for enabled, params, fault in (
        (True, {}, []),
        (True, {"a": [{"tag": "{weights}"}]}, []),
        (True, {"pin": True}, ["fuse.interstage.kv_transfer_params"]),
        (False, {"pin": True}, ["fuse.interstage.kv_transfer_params"]),
        (False, None, ["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config"]),
    ):
        config.fuse.interstage.enabled, config.fuse.interstage.kv_transfer_params = enabled, params
        assert [
            found.key for found in InterstagePlugin().fuse_validate(config=config) if "kv_transfer" in found.key
        ] == fault


def test_a_store_that_vllm_empties_when_a_replica_is_freed_is_refused_with_migration():
    mooncake = {"kv_connector": "MultiConnector", "connectors": [{"kv_connector": "MooncakeStoreConnector"}]}
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"kv_transfer_config": mooncake}}}},
            "fuse": {"interstage": {"enabled": True, "kv_transfer_params": {}, "migration_threshold": None}},
        }
    )
    assert not [found for found in InterstagePlugin().fuse_validate(config=config) if "kv_transfer" in found.key]
    config.fuse.interstage.migration_threshold = 4
    (refused,) = [found for found in InterstagePlugin().fuse_validate(config=config) if "kv_transfer" in found.key]
    assert "empties the whole Mooncake store" in str(refused)
