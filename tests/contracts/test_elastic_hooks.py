"""`fuse_predict`, `fuse_scale` and `fuse_assign` through the manager: the built-in plugin decides, a stranger's predictor, scaler and router replace
it, and a broken one costs the step's optimisation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.policy import PolicyGuard
from verl_fuse.host.settings import load_settings
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Event, Migration, ReplicaView, RolloutView
from verl_fuse.spec.timeline import Span, Timeline

STRANGER = """
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.prompts import Prediction

HOOK_API = 1


@hookimpl
def fuse_predict(prompts):
    if prompts[0].source == "broken":
        return [Prediction(5.0, 1.0) for prompt in prompts]
    return [Prediction(len(prompt.key), len(prompt.key)) for prompt in prompts]


@hookimpl
def fuse_scale(prompts, replicas):
    return 7 if prompts[0].source == "greedy" else 1


@hookimpl
def fuse_assign(prompts, replicas):
    return {prompt.uid: 9 if prompt.source == "lost" else replicas[-1].rank for prompt in prompts}
"""

REPLICAS = tuple(ReplicaView(rank, 0, 64, routed=True) for rank in range(3))


def prompts(*keys: str, source: str = "math") -> list[Prompt]:
    return [Prompt(f"uid-{key}", key, source, 2) for key in keys]


def enabled(**block) -> tuple[PolicyGuard, SimpleNamespace]:
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {"rollout": {"response_length": 100}},
            "fuse": {"disabled_plugins": ["observe"], "elastic": {"enabled": True, **block}},
        }
    )
    settings = load_settings(config)
    asked: list = []
    replicas = SimpleNamespace(views=lambda: REPLICAS, devices_each=2)
    trainer = SimpleNamespace(settings=settings, config=config, use_routing=asked.append, replicas=replicas)
    trainer.use_standalone = lambda most, timeout: asked.append((most, timeout))
    settings.manager.hook.fuse_setup(trainer=trainer)
    policy = PolicyGuard(settings.manager.hook)
    policy.begin_step(2)
    return policy, SimpleNamespace(hook=settings.manager.hook, asked=asked)


def tell(hook, kind: str, **data) -> None:
    hook.fuse_event(event=Event(kind, 1, 0.0, data=data))  # type: ignore[arg-type]


def test_the_built_in_plugin_learns_lengths_and_groups_prompts_by_them(tmp_path: Path):
    policy, run = enabled(warm_prefix_tokens=512)
    assert run.asked == [512], "routing is on, with the prefix length"
    tell(run.hook, "setup", resumed_from=None)
    wanted = prompts("long", "short", "brief", "tiny")
    assert policy.predict(wanted) is None
    first = policy.assign(wanted, REPLICAS[:2])
    assert sorted(first.values()) == [0, 0, 1, 1]
    by_uid = {p.uid: p for p in wanted}
    tell(
        run.hook,
        "generated",
        prompts=by_uid,
        responses={p.uid: [900, 1100] if p.key == "long" else [10, 10] for p in wanted},
    )
    predicted = policy.predict(wanted)
    assert [prediction.tokens for prediction in predicted] == [1000.0, 10.0, 10.0, 10.0]
    told = [Prompt(p.uid, p.key, p.source, 2, found) for p, found in zip(wanted, predicted, strict=True)]
    assert policy.assign(told, REPLICAS[:2]) == {"uid-long": 0, "uid-short": 1, "uid-brief": 1, "uid-tiny": 1}
    tell(run.hook, "checkpoint", folder=str(tmp_path))

    policy, run = enabled()
    tell(run.hook, "setup", resumed_from=tmp_path)
    assert policy.predict(wanted) == predicted
    assert run.asked == [None]


def measured_step() -> Timeline:
    """Two replicas; a decode step of b sequences took 0.1 + 0.01 b seconds."""
    spans = [Span("gen", "step", "stage", 0.0, 26.0)]
    for rank, lengths in enumerate(([200, 100], [50, 150])):
        short, long = sorted(lengths)
        first = short * (0.1 + 0.02)
        for length, end in ((short, first), (long, first + (long - short) * (0.1 + 0.01))):
            args = {"prompt_tokens": 9, "response_tokens": length, "stop_reason": "completed"}
            spans.append(Span("request", f"replica {rank}", "generate", 0.0, end, args))
    return Timeline("run", 1, 0.0, 30.0, tuple(spans))


def test_the_built_in_scaler_runs_as_many_replicas_as_pay_and_says_what_it_predicted(caplog):
    policy, run = enabled(scale=True, cost_weight=1.0, price=0.5, hysteresis=0.0)
    tell(run.hook, "setup", resumed_from=None)
    wanted = prompts("a", "b", "c", "d")
    assert policy.scale(wanted, REPLICAS, 3) == 3, "nothing is known yet"
    assert policy.assign(wanted, REPLICAS)
    by_uid = {p.uid: p for p in wanted}
    tell(run.hook, "generated", prompts=by_uid, responses={p.uid: [50, 100] for p in wanted})
    run.hook.fuse_event(event=Event("step_end", 1, 0.0, timeline=measured_step(), data={}))
    told = [replace(p, prediction=q) for p, q in zip(wanted, policy.predict(wanted), strict=True)]
    assert policy.scale(told, REPLICAS, 3) == 1
    assert policy.assign(told, REPLICAS[:1]) == {p.uid: 0 for p in wanted}
    metrics = {}
    with caplog.at_level("INFO"):
        for found in run.hook.fuse_metrics(timeline=measured_step()):
            metrics |= found or {}
    assert metrics["fuse/elastic_replicas"] == 2, "the timeline is of a step on two"
    predicted = 0.1 * 75 + 0.01 * 75 * 8
    assert metrics["fuse/elastic_predicted_seconds"] == pytest.approx(predicted, rel=0.05)
    assert metrics["fuse/elastic_seconds"] == 26.0
    assert metrics["fuse/device_seconds_busy"] + metrics["fuse/device_seconds_idle"] == pytest.approx(2 * 3 * 26.0)
    assert metrics["fuse/cost_per_million_tokens"] == pytest.approx(1e6 * 0.5 * 2 * 3 * 30.0 / 600)
    assert "1 of 3 replicas; generation" in caplog.text


def test_a_replica_that_is_done_is_released_where_that_is_on():
    policy, _ = enabled(release=True)
    replicas = (ReplicaView(0, 0, 8, True, 4, 0), ReplicaView(1, 3, 8, True, 4, 3))
    view = RolloutView(2, 1.0, 8, 5, 2, 0, (), (), replicas)
    assert policy.migration(view) == Migration((1,))
    policy, _ = enabled()
    assert policy.migration(view) is None


def test_more_replicas_than_there_are_cannot_be_asked_for():
    with pytest.raises(FuseError, match=r"fuse\.elastic\.min_replicas=4: this run has 3 rollout replicas$"):
        enabled(min_replicas=4)
    with pytest.raises(
        FuseError, match=r"max_replicas=6: this run has 3 rollout replicas, and fuse\.elastic\.standalone=2"
    ):
        enabled(max_replicas=6, standalone=2)


def learned(**block):
    """A policy that knows the lengths of four prompts and what decoding costs, and these prompts."""
    policy, run = enabled(**block)
    tell(run.hook, "setup", resumed_from=None)
    wanted = prompts("a", "b", "c", "d")
    first = policy.scale(wanted, REPLICAS, 5)
    tell(
        run.hook,
        "generated",
        prompts={p.uid: p for p in wanted},
        responses={p.uid: [50, 100] for p in wanted},
    )
    run.hook.fuse_event(event=Event("step_end", 1, 0.0, timeline=measured_step(), data={}))
    told = [replace(p, prediction=q) for p, q in zip(wanted, policy.predict(wanted), strict=True)]
    return policy, run, told, first


def test_standalone_replicas_are_asked_for_where_time_pays_and_only_once_something_is_known():
    policy, run, told, first = learned(scale=True, cost_weight=0.0, hysteresis=0.0, standalone=2)
    assert run.asked == [None, (2, 600.0)]
    assert first == 3, "nothing is known: those there are"
    assert policy.scale(told, REPLICAS, 5) == 4, "one for each prompt"
    policy, _, told, first = learned(scale=False, standalone=2)
    assert (first, policy.scale(told, REPLICAS, 5)) == (5, 5)
    policy, _, told, first = learned(scale=True, min_replicas=4, cost_weight=1.0, standalone=2)
    assert (first, policy.scale(told, REPLICAS, 5)) == (4, 4)


def test_what_creating_a_replica_took_counts_against_creating_another():
    terms = {"scale": True, "cost_weight": 0.2, "hysteresis": 0.0, "standalone": 1}
    policy, _, told, _ = learned(**terms)
    assert policy.scale(told, REPLICAS, 4) == 4
    policy, run, told, _ = learned(**terms)
    start = Span("start", "replica 1", "other", 0.0, 40.0, {"start_seconds": 30.0})
    timeline = replace(measured_step(), spans=(*measured_step().spans, start))
    run.hook.fuse_event(event=Event("step_end", 2, 0.0, timeline=timeline, data={}))
    metrics = {}
    for found in run.hook.fuse_metrics(timeline=timeline):
        metrics |= found or {}
    assert metrics["fuse/device_seconds_starting"] == 2 * 40.0
    assert policy.scale(told, REPLICAS, 4) == 2


def test_the_forecast_is_of_the_replicas_there_are_while_others_are_created():
    policy, run, told, _ = learned(scale=True, cost_weight=0.0, hysteresis=0.0, standalone=2)
    alone = REPLICAS[:1]
    assert policy.scale(told, alone, 5) == 4
    metrics = {}
    for found in run.hook.fuse_metrics(timeline=measured_step()):
        metrics |= found or {}
    assert metrics["fuse/elastic_predicted_seconds"] == pytest.approx(0.1 * 75 + 0.01 * 75 * 8, rel=0.05)


def test_off_it_answers_nothing(tmp_path: Path):
    settings = load_settings(OmegaConf.create({"fuse": {"disabled_plugins": ["observe"]}}))
    hook = settings.manager.hook
    hook.fuse_setup(trainer=SimpleNamespace(settings=settings))
    tell(hook, "checkpoint", folder=str(tmp_path))
    assert not list(tmp_path.iterdir())
    wanted = prompts("a", "b")
    assert hook.fuse_predict(prompts=wanted) is None
    assert hook.fuse_scale(prompts=wanted, replicas=REPLICAS, most=3) is None
    assert hook.fuse_assign(prompts=wanted, replicas=REPLICAS) is None


def test_a_stranger_s_predictor_scaler_and_router_are_asked_first(installed_plugin):
    installed_plugin("acme", STRANGER)
    policy, _ = enabled()
    wanted = prompts("a", "abc")
    assert policy.predict(wanted) == [Prediction(1, 1), Prediction(3, 3)]
    assert policy.scale(wanted, REPLICAS, 3) == 1
    assert policy.assign(wanted, REPLICAS) == {"uid-a": 2, "uid-abc": 2}
    assert policy.fallbacks == 0


def test_lengths_are_learned_whoever_routes(installed_plugin, tmp_path: Path):
    installed_plugin("acme", STRANGER)
    policy, run = enabled()
    tell(run.hook, "setup", resumed_from=None)
    wanted = prompts("a", "b")
    policy.assign(wanted, REPLICAS)
    told = {p.uid: replace(p, prediction=Prediction(4, 8)) for p in wanted}
    tell(run.hook, "generated", prompts=told, responses={"uid-a": [3, 5], "uid-b": [7, 9], "replayed": [1]})
    metrics = {}
    for found in run.hook.fuse_metrics(timeline=measured_step()):
        metrics |= found or {}
    assert metrics["fuse/elastic_upper_coverage"] == 0.75
    tell(run.hook, "checkpoint", folder=str(tmp_path))
    assert json.loads((tmp_path / "fuse_elastic_lengths.json").read_text())["means"] == {"a": 4.0, "b": 8.0}


@pytest.mark.parametrize(
    ("source", "ask", "message"),
    [
        ("broken", lambda policy, found: policy.predict(found), "allowed: finite, 0 <= tokens <= upper"),
        ("greedy", lambda policy, found: policy.scale(found, REPLICAS, 3), "fuse_scale returned 7; allowed: 1 to 3 replicas"),
        ("lost", lambda policy, found: policy.assign(found, REPLICAS), "fuse_assign returned 'uid-a': 9; allowed: prompts of"),
    ],
)  # fmt: skip
def test_a_stranger_s_mistake_leaves_the_step_to_verl(installed_plugin, caplog, source, ask, message):
    installed_plugin("acme", STRANGER)
    policy, _ = enabled()
    assert ask(policy, prompts("a", "b", source=source)) is None
    assert policy.fallbacks == 1
    assert message in caplog.text
    assert "failed in step 2; the rest of this step runs as in stock verl" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"name": "sglang"}}, "actor_rollout_ref.rollout.name='sglang': fuse.elastic.enabled=true needs vllm"),
        ({"rollout": {"full_determinism": True}}, "actor_rollout_ref.rollout.full_determinism=True: "),
        ({"rollout": {"router_config_path": "mine.yaml"}}, "actor_rollout_ref.rollout.router_config_path='mine.yaml': "),
        ({"mode": "sync"}, "trainer.v1.trainer_mode='sync': fuse.elastic.enabled=true needs trainer.v1.trainer_mode=fuse"),
        ({"block": {"warm_prefix_tokens": 0}}, "fuse.elastic.warm_prefix_tokens=0: needs >= 1"),
        ({"block": {"cost_weight": 2}}, "fuse.elastic.cost_weight=2.0: needs >= 0.0 and <= 1.0"),
        ({"block": {"price": -1}}, "fuse.elastic.price=-1.0: needs >= 0.0"),
        ({"block": {"min_replicas": 3, "max_replicas": 2}}, "fuse.elastic.min_replicas=3: at most fuse.elastic.max_replicas, which is 2"),
        ({"block": {"cut_fraction": 0.8}}, "fuse.elastic.cut_fraction=0.8: needs fuse.elastic.release=true"),
        ({"block": {"release": True}, "interstage": {"enabled": True, "migration_threshold": 4}}, "fuse.interstage.migration_threshold=4: needs fuse.elastic.release=false"),
        ({"block": {"scale": True}, "interstage": {"enabled": True, "migration_threshold": 4}}, "fuse.interstage.migration_threshold=4: needs fuse.elastic.scale=false"),
        ({"block": {"warm": 1}}, "fuse.elastic.warm: unknown key; allowed: "),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(change, message):
    config = {
        "trainer": {"v1": {"trainer_mode": change.get("mode", "fuse")}},
        "actor_rollout_ref": {"rollout": {"name": "vllm", **change.get("rollout", {})}},
        "fuse": {
            "elastic": {"enabled": True, **change.get("block", {})},
            "interstage": {"enabled": True, **change.get("interstage", {})},
        },
    }
    with pytest.raises(FuseError) as refused:
        load_settings(OmegaConf.create(config))
    assert message in str(refused.value)
