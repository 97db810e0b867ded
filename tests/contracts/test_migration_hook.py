"""`fuse_migration` and `fuse_infer_next` through the manager: the built-in policies decide, a stranger's replace them (when the tail moves, where to,
what a lane runs next), a broken one costs the step's optimisation."""

from dataclasses import replace
from types import SimpleNamespace

from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.host.policy import PolicyGuard
from verl_fuse.host.settings import load_settings
from verl_fuse.spec.step import Event, LaneView, Migration, ReplicaView, RequestView, RolloutView, Sample
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse_interstage import plugin

STRANGER = """
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.step import Migration

HOOK_API = 1


@hookimpl
def fuse_migration(view):
    if view.unfinished == 1:
        return Migration(survivors=(9,))
    # Keeps the idlest replica, and never waits.
    return Migration(survivors=(min(view.replicas, key=lambda replica: replica.running).rank,))
"""

SHORTEST_FIRST = """
from verl_fuse.hookspecs import hookimpl

HOOK_API = 1


@hookimpl
def fuse_infer_next(view, lane):
    ranked = sorted(view.ready, key=lambda sample: sample.seq_len)
    return [sample.key for sample in ranked[:1]] or None
"""


def view(unfinished):
    replicas = tuple(ReplicaView(rank, running, 8, routed=True) for rank, running in enumerate((1, 5, 3)))
    return RolloutView(
        step=2,
        elapsed=4.0,
        expected=40,
        finished=40 - unfinished,
        groups=10,
        groups_finished=0,
        ready=(),
        lanes=(),
        replicas=replicas,
    )


def policies() -> PolicyGuard:
    block = {"interstage": {"enabled": True, "migration_threshold": 0.25}}
    config = {"trainer": {"v1": {"trainer_mode": "fuse"}}, "fuse": block}
    settings = load_settings(OmegaConf.create(config))
    settings.manager.hook.fuse_setup(trainer=SimpleNamespace(settings=settings))
    return PolicyGuard(settings.manager.hook)


def test_the_built_in_policy_keeps_the_busiest_replicas_once_the_tail_is_short():
    policy = policies()
    assert policy.migration(view(11)) is None
    assert policy.migration(view(10)) == Migration(survivors=(1, 2))
    assert policy.migration(view(8)) == Migration(survivors=(1,))


def test_a_stranger_s_policy_is_asked_first(installed_plugin):
    installed_plugin("acme", STRANGER)
    assert policies().migration(view(30)) == Migration(survivors=(0,))


def test_a_stranger_decides_what_a_lane_runs_next(installed_plugin):
    ready = tuple(Sample(f"s{length}", "g", 4, length) for length in (30, 8, 12))
    lane = LaneView("slice 1", ("ref",), queued=0, multiple=1, released=True)
    assert policies().infer_next(replace(view(10), ready=ready), lane) == ["s30", "s12", "s8"]
    installed_plugin("acme", SHORTEST_FIRST)
    assert policies().infer_next(replace(view(10), ready=ready), lane) == ["s8"]


def test_a_stranger_s_mistake_leaves_the_requests_where_they_are(installed_plugin, caplog):
    installed_plugin("acme", STRANGER)
    policy = policies()
    assert policy.migration(view(1)) is None
    assert policy.fallbacks == 1
    assert "fuse_migration returned survivors [9]" in caplog.text


def test_the_hook_itself_answers_with_the_first_result(installed_plugin):
    installed_plugin("acme", STRANGER)
    settings = load_settings(OmegaConf.create({"fuse": {}}))
    settings.manager.hook.fuse_setup(trainer=SimpleNamespace(settings=settings))
    assert settings.manager.hook.fuse_migration(view=view(20)) == Migration(survivors=(0,))


def measured_step() -> tuple[Timeline, list[tuple[int, int]]]:
    """Forty samples on three replicas, four of them ten times as long, 0.1 s per token, and 60 s of inference on slices afterwards."""
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


def test_the_automatic_threshold_watches_one_step_and_decides_the_next():
    block = {"interstage": {"enabled": True, "migration_threshold": "auto", "layout": "slices"}}
    rollout = {"prompt_length": 8, "response_length": 120}
    config = {
        "trainer": {"v1": {"trainer_mode": "fuse"}},
        "fuse": {"disabled_plugins": ["observe"], **block},
        "actor_rollout_ref": {"rollout": rollout},
    }
    config = OmegaConf.create(config)
    settings = load_settings(config)
    groups = []
    replicas = SimpleNamespace(views=lambda: view(40).replicas)
    trainer = SimpleNamespace(
        settings=settings, config=config, replicas=replicas, use_slices=lambda: groups.append("slices")
    )
    hook = settings.manager.hook
    hook.fuse_setup(trainer=trainer)
    assert groups == ["slices"]

    assert [hook.fuse_migration(view=replace(view(left), step=1)) for left in (20, 10, 4, 1)] == [None] * 4
    timeline, lengths = measured_step()
    hook.fuse_event(event=Event("step_end", 1, 40.0, timeline=timeline, data={"samples": 40, "lengths": lengths}))
    decided = [hook.fuse_migration(view=view(left)) for left in range(39, 0, -1)]
    assert decided[0] is None
    assert decided[-1] is not None
    metrics = {}
    for found in hook.fuse_metrics(timeline=replace(timeline, step=2)):
        metrics |= found or {}
    threshold = metrics["fuse/migration_threshold"]
    assert [left for left in range(39, 0, -1) if decided[39 - left]] == list(range(int(threshold), 0, -1))
    assert metrics["fuse/predicted_stage_seconds"] < metrics["fuse/predicted_stock_seconds"]
    assert metrics["fuse/stage_seconds"] == 30.0


TELLING = """
from verl_fuse.hookspecs import hookimpl

HOOK_API = 1


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
    (refused,) = [found for found in plugin.fuse_validate(config=config) if "kv_transfer_config" in found.key]
    assert "fuse.interstage.kv_transfer_params" in str(refused)
    for enabled, params, fault in (
        (True, {}, []),
        (True, {"a": [{"tag": "{weights}"}]}, []),
        (True, {"pin": True}, ["fuse.interstage.kv_transfer_params"]),
        (False, {"pin": True}, ["fuse.interstage.kv_transfer_params"]),
        (False, None, ["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config"]),
    ):
        config.fuse.interstage.enabled, config.fuse.interstage.kv_transfer_params = enabled, params
        assert [found.key for found in plugin.fuse_validate(config=config) if "kv_transfer" in found.key] == fault


def test_a_store_that_vllm_empties_when_a_replica_is_freed_is_refused_with_migration():
    mooncake = {"kv_connector": "MultiConnector", "connectors": [{"kv_connector": "MooncakeStoreConnector"}]}
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"kv_transfer_config": mooncake}}}},
            "fuse": {"interstage": {"enabled": True, "kv_transfer_params": {}, "migration_threshold": None}},
        }
    )
    assert not [found for found in plugin.fuse_validate(config=config) if "kv_transfer" in found.key]
    config.fuse.interstage.migration_threshold = 4
    (refused,) = [found for found in plugin.fuse_validate(config=config) if "kv_transfer" in found.key]
    assert "empties the whole Mooncake store" in str(refused)
