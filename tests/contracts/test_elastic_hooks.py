"""`fuse_predict`, `fuse_scale` and `fuse_assign` through the manager: the built-in plugin decides, a stranger's
predictor, scaler and router replace it, and a broken one costs the step's optimisation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.events import CheckpointSaved, Event, Generated, Polled, SetUp, StepBegun, StepEnded
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Capacity, Migration, ReplicaView, RolloutView
from verl_fuse.spec.timeline import Span, Timeline

STRANGER = """
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.events import CheckpointSaved, Event, Generated, SetUp, StepBegun, StepEnded
from verl_fuse.spec.prompts import Prediction

HOOK_API = 2


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

REPLICAS = tuple(ReplicaView(rank, 0, 64, routed=True, capacity=Capacity(64)) for rank in range(3))


def prompts(*keys: str, source: str = "math") -> list[Prompt]:
    return [Prompt(f"uid-{key}", key, source, 2) for key in keys]


def enabled(views=REPLICAS, **block) -> tuple[PolicyGuard, SimpleNamespace]:
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {"rollout": {"response_length": 100}},
            "fuse": {"disabled_plugins": ["observe"], "elastic": {"enabled": True, **block}},
        }
    )
    settings = load_settings(config)
    asked: list = []
    trainer = SimpleNamespace(
        block=settings.blocks.get,
        config=config,
        replica_views=lambda: views,
        devices_each=2,
        use_routing=asked.append,
        add_part=lambda make: asked.append((make.func.__name__, make.keywords)),
    )
    settings.manager.hook.fuse_setup(trainer=trainer)
    policy = PolicyGuard(settings.manager.hook)
    policy.begin_step(2)
    return policy, SimpleNamespace(hook=settings.manager.hook, asked=asked)


def tell(hook, kind: type[Event], **fields) -> None:
    hook.fuse_event(event=kind(1, 0.0, **fields))


def begin(hook, resumed_from: Path | None = None) -> None:
    tell(hook, SetUp, run_dir=Path("run"), resumed_from=resumed_from, total_steps=9, expected=8, groups=4)


def end(hook, step: int, timeline: Timeline) -> None:
    hook.fuse_event(event=StepEnded(step, 0.0, timeline, samples=8, lengths={}, metrics={}))


def test_the_built_in_plugin_learns_lengths_and_groups_prompts_by_them(tmp_path: Path):
    policy, run = enabled(warm_prefix_tokens=512)
    assert run.asked == [512], "routing is on, with the prefix length"
    begin(run.hook)
    wanted = prompts("long", "short", "brief", "tiny")
    assert policy.predict(wanted) is None
    first = policy.assign(wanted, REPLICAS[:2], {})
    assert sorted(first.values()) == [0, 0, 1, 1]
    by_uid = {p.uid: p for p in wanted}
    tell(
        run.hook,
        Generated,
        prompts=by_uid,
        responses={p.uid: [900, 1100] if p.key == "long" else [10, 10] for p in wanted},
        discarded={},
    )
    predicted = policy.predict(wanted)
    assert [prediction.tokens for prediction in predicted] == [1000.0, 10.0, 10.0, 10.0]
    told = [Prompt(p.uid, p.key, p.source, 2, found) for p, found in zip(wanted, predicted, strict=True)]
    assert policy.assign(told, REPLICAS[:2], {}) == {"uid-long": 0, "uid-short": 1, "uid-brief": 1, "uid-tiny": 1}
    tell(run.hook, CheckpointSaved, folder=tmp_path)

    policy, run = enabled()
    begin(run.hook, resumed_from=tmp_path)
    assert policy.predict(wanted) == predicted
    assert run.asked == [None]


def measured_step(cold: float = 0.0) -> Timeline:
    """Two replicas; a decode step of b sequences took 0.1 + 0.01 b seconds, once `cold` seconds had passed."""
    spans = [Span("gen", "step", "stage", 0.0, 26.0 + cold)]
    for rank, lengths in enumerate(([200, 100], [50, 150])):
        short, long = sorted(lengths)
        first = short * (0.1 + 0.02)
        for length, end in ((short, first), (long, first + (long - short) * (0.1 + 0.01))):
            args = {"prompt_tokens": 9, "response_tokens": length, "stop_reason": "completed"}
            spans.append(Span("request", f"replica {rank}", "generate", 0.0, cold + end, args))
    return Timeline("run", 1, 0.0, 30.0 + cold, tuple(spans))


def measure(hook) -> None:
    """Two steps end; the first one pays for what an engine does once."""
    for timeline in (measured_step(cold=80.0), measured_step()):
        end(hook, 1, timeline)


def test_the_built_in_scaler_runs_as_many_replicas_as_pay_and_says_what_it_predicted(caplog):
    policy, run = enabled(scale=True, cost_weight=1.0, price=0.5, hysteresis=0.0)
    begin(run.hook)
    wanted = prompts("a", "b", "c", "d")
    assert policy.scale(wanted, REPLICAS, 3) == 3, "nothing is known yet"
    assert policy.assign(wanted, REPLICAS, {})
    by_uid = {p.uid: p for p in wanted}
    tell(run.hook, Generated, prompts=by_uid, responses={p.uid: [50, 100] for p in wanted}, discarded={})
    measure(run.hook)
    told = [replace(p, prediction=q) for p, q in zip(wanted, policy.predict(wanted), strict=True)]
    assert policy.scale(told, REPLICAS, 3) == 1
    assert policy.assign(told, REPLICAS[:1], {}) == {p.uid: 0 for p in wanted}
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


def test_tokens_of_tools_take_no_replica_s_time():
    """Three of four response tokens are a tool's; where requests know no prompt, all are taken for generated."""
    wanted = prompts("a", "b", "c", "d")
    seconds = []
    for known in (True, False):
        policy, run = enabled(scale=True, cost_weight=1.0, hysteresis=0.0)
        begin(run.hook)
        by_uid = {p.uid: p for p in wanted}
        tell(run.hook, Generated, prompts=by_uid, responses={p.uid: [200, 400] for p in wanted}, discarded={})
        *requests, generation = measured_step().spans
        told = [
            replace(span, args={**span.args, "response_tokens": 150, **({"prompt": p.uid} if known else {})})
            for span, p in zip(requests, wanted, strict=True)
        ]
        step = replace(measured_step(), spans=(generation, *told))
        assert seen(run.hook, step)["fuse/generated_share"] == 0.25
        end(run.hook, 1, step)
        measure(run.hook)
        predicted = [replace(p, prediction=q) for p, q in zip(wanted, policy.predict(wanted), strict=True)]
        assert {p.prediction.tokens for p in predicted} == {300.0}, "all tokens need room"
        policy.scale(predicted, REPLICAS, 3)
        seconds.append(seen(run.hook, measured_step())["fuse/elastic_predicted_seconds"])
    # A response has at most 100 tokens here, which the longest of the second run meets.
    assert seconds[0] == pytest.approx(0.1 * 75 + 0.01 * 75 * 8, rel=0.05)
    assert seconds[1] > 2.5 * seconds[0]


def test_a_forecast_that_was_right_stays_where_tools_wrote_half_of_the_tokens():
    policy, run, told, _ = learned(scale=True, cost_weight=1.0, hysteresis=0.0)
    known = {p.uid: replace(p, prediction=Prediction(100.0, 100.0)) for p in told}
    *requests, generation = measured_step().spans
    with_prompts = [replace(span, args={**span.args, "prompt": uid}) for span, uid in zip(requests, known, strict=True)]
    tell(run.hook, Generated, prompts=known, responses={uid: [125, 125] for uid in known}, discarded={})
    end(run.hook, 1, replace(measured_step(), spans=(generation, *with_prompts)))
    seconds = 0.1 * 50 + 0.01 * 50 * 8
    alone = (Span("gen", "step", "stage", 0.0, seconds), Span("request", "replica 0", "generate", 0.0, seconds, {}))
    for number in (2, 3):
        tell(run.hook, StepBegun)
        assert policy.scale(list(known.values()), REPLICAS, 3) == 1
        assert foretold(run) == pytest.approx(seconds, rel=0.05)
        tell(run.hook, Polled, view=RolloutView(number, 1.0, 8, 5, 2, 0, (), (), REPLICAS[:1]))
        tell(run.hook, Generated, prompts=known, responses={uid: [100, 100] for uid in known}, discarded={})
        took = Timeline("run", number, 0.0, 30.0, alone)
        seen(run.hook, took)
        end(run.hook, number, took)


def test_tokens_of_tools_that_running_prompts_wait_for_do_not_keep_others_away():
    policy, run = enabled()
    begin(run.hook)
    search, math = prompts("search", source="search")[0], prompts("math")[0]
    by_uid = {p.uid: p for p in (search, math)}
    tell(run.hook, Generated, prompts=by_uid, responses={uid: [400, 400] for uid in by_uid}, discarded={})
    made = {search.uid: 200, math.uid: 800}
    spans = [
        Span("request", "replica 0", "generate", 0.0, 9.0, {"prompt_tokens": 9, "response_tokens": n, "prompt": uid})
        for uid, n in made.items()
    ]
    end(run.hook, 1, Timeline("run", 1, 0.0, 30.0, (Span("gen", "step", "stage", 0.0, 26.0), *spans)))
    running = {
        0: [replace(search, prediction=Prediction(400, 400))],
        1: [replace(math, prediction=Prediction(200, 200))],
    }
    assert policy.assign(prompts("new"), REPLICAS[:2], running) == {"uid-new": 0}, "100 tokens are left there"


def test_the_cost_of_decoding_is_read_for_the_engine_that_holds_least():
    """Where the KV cache holds one request, the two of a replica ran one after the other: 40 s for 500 tokens."""
    views = (REPLICAS[0], replace(REPLICAS[1], capacity=Capacity(64, 15.0)), REPLICAS[2])
    policy, run, told, _ = learned(views, scale=True, cost_weight=1.0, hysteresis=0.0)
    assert policy.scale(told, REPLICAS, 3) == 1
    assert foretold(run) == pytest.approx(0.08 * 75, rel=0.05)


def test_a_run_is_charged_for_the_replicas_that_the_last_look_saw():
    _, run, _, _ = learned(price=0.5)
    assert seen(run.hook, measured_step())["fuse/device_seconds_parked"] == 0
    tell(run.hook, Polled, view=RolloutView(2, 1.0, 8, 5, 2, 0, (), (), REPLICAS[:2]))
    found = seen(run.hook, measured_step())
    assert found["fuse/device_seconds_busy"] + found["fuse/device_seconds_idle"] == pytest.approx(2 * 2 * 26.0)
    assert found["fuse/cost_per_million_tokens"] == pytest.approx(1e6 * 0.5 * 2 * 2 * 30.0 / 600)


def seen(hook, timeline: Timeline) -> dict[str, float]:
    return {name: value for found in hook.fuse_metrics(timeline=timeline) for name, value in (found or {}).items()}


def test_a_replica_that_is_done_is_released_where_that_is_on():
    policy, _ = enabled(release=True)
    replicas = (ReplicaView(0, 0, 8, True, 4, 0), ReplicaView(1, 3, 8, True, 4, 3))
    view = RolloutView(2, 1.0, 8, 5, 2, 0, (), (), replicas)
    assert policy.migration(view) == Migration((1,))
    policy, _ = enabled()
    assert policy.migration(view) is None


def test_a_rest_that_has_nowhere_to_go_is_told_once_a_step_and_counted(caplog):
    policy, run = enabled(release=True, cut_fraction=0.5)
    replicas = (ReplicaView(0, 2, 4, True, 8, 2), ReplicaView(1, 7, 8, True, 8, 7))
    view = RolloutView(2, 1.0, 16, 7, 2, 0, (), (), replicas)

    def measured():
        found = [metrics for metrics in run.hook.fuse_metrics(timeline=measured_step()) if metrics]
        return {name: value for metrics in found for name, value in metrics.items()}["fuse/elastic_without_room"]

    assert measured() == 0
    with caplog.at_level("INFO"):
        assert [policy.migration(view), policy.migration(view)] == [None, None]
    assert caplog.text.count("step 2: a replica past fuse.elastic.cut_fraction keeps its requests") == 1
    assert "replica 1 has 7 samples left and room for 8" in caplog.text
    assert measured() == 1
    tell(run.hook, StepBegun)
    assert measured() == 0


def test_more_replicas_than_there_are_cannot_be_asked_for():
    with pytest.raises(FuseError, match=r"fuse\.elastic\.min_replicas=4: this run has 3 rollout replicas$"):
        enabled(min_replicas=4)
    with pytest.raises(
        FuseError, match=r"max_replicas=6: this run has 3 rollout replicas, and fuse\.elastic\.standalone=2"
    ):
        enabled(max_replicas=6, standalone=2)
    enabled(min_replicas=3)
    enabled(max_replicas=5, standalone=2)


def learned(views=REPLICAS, **block):
    """Return a policy that knows the lengths of four prompts and the cost of decoding, and these prompts."""
    policy, run = enabled(views, **block)
    begin(run.hook)
    wanted = prompts("a", "b", "c", "d")
    first = policy.scale(wanted, REPLICAS, 5)
    tell(
        run.hook,
        Generated,
        prompts={p.uid: p for p in wanted},
        responses={p.uid: [50, 100] for p in wanted},
        discarded={},
    )
    measure(run.hook)
    told = [replace(p, prediction=q) for p, q in zip(wanted, policy.predict(wanted), strict=True)]
    return policy, run, told, first


def foretold(run) -> float:
    """Seconds of generation that the last decision rests on."""
    found = {}
    for metrics in run.hook.fuse_metrics(timeline=measured_step()):
        found |= metrics or {}
    return found["fuse/elastic_predicted_seconds"]


def test_a_step_that_took_longer_than_its_lengths_say_makes_the_next_forecast_longer():
    policy, run, told, _ = learned(scale=True, cost_weight=1.0, hysteresis=0.0)
    lengths = {p.uid: [50, 100] for p in told}
    seconds = []
    for _ in range(2):
        tell(run.hook, StepBegun)
        policy.scale(told, REPLICAS, 3)
        tell(run.hook, Generated, prompts={p.uid: p for p in told}, responses=lengths, discarded={})
        seconds.append(foretold(run))
        end(run.hook, 2, measured_step())
    assert seconds[1] > 1.05 * seconds[0], "a step of 16 s, by its lengths, took longer"


def test_what_the_first_step_of_an_engine_took_is_no_cost(tmp_path: Path):
    terms = {"scale": True, "cost_weight": 0.0, "hysteresis": 0.0}
    policy, run, told, _ = learned(**terms)
    policy.scale(told, REPLICAS, 3)
    decided = foretold(run)
    assert decided < 20.0, "80 s of warm-up are not in it"
    tell(run.hook, CheckpointSaved, folder=tmp_path)

    policy, run = enabled(**terms)
    begin(run.hook, resumed_from=tmp_path)
    assert policy.predict(told) == [prompt.prediction for prompt in told]
    policy.scale(told, REPLICAS, 3)
    assert foretold(run) == decided, "the first step of the run that goes on is decided on the same costs"
    end(run.hook, 3, measured_step(cold=80.0))
    policy.scale(told, REPLICAS, 3)
    assert foretold(run) == decided, "and the second, whose engines have been warm once"


def test_costs_of_replicas_of_other_devices_are_not_taken_over(tmp_path: Path, caplog):
    policy, run, told, _ = learned(scale=True, cost_weight=1.0, hysteresis=0.0)
    tell(run.hook, CheckpointSaved, folder=tmp_path)
    file = tmp_path / "fuse_elastic.json"
    file.write_text(file.read_text().replace('"devices": 2', '"devices": 4'))
    policy, run = enabled(scale=True, cost_weight=1.0, hysteresis=0.0)
    begin(run.hook, resumed_from=tmp_path)
    assert policy.predict(told) == [prompt.prediction for prompt in told], "lengths are those of the data"
    assert policy.scale(told, REPLICAS, 3) == 3
    assert "its costs were measured on replicas of 4 devices, this run's have 2" in caplog.text


def test_prompts_that_a_running_step_asks_for_join_its_plan():
    policy, run, told, _ = learned(scale=True, cost_weight=0.0, hysteresis=0.0)
    tell(run.hook, StepBegun)
    policy.scale(told, REPLICAS, 3)
    planned = foretold(run)
    refill = [Prompt(f"uid-{key}", key, "math", 2, Prediction(75.0, 100.0)) for key in ("e", "f", "g")]
    running = {0: told[:2], 1: [replace(told[2], samples=1)], 2: []}
    homes = policy.assign(refill, REPLICAS, running)
    assert homes == {"uid-e": 2, "uid-f": 1, "uid-g": 2}
    assert policy.assign(refill, REPLICAS[1:], {1: told[:1], 2: []}).keys() == homes.keys()
    everything = {p.uid: p for p in (*told, *refill)}
    discarded = {"uid-a": [50, 100], "uid-e": [30, 30], "uid-failed": []}
    trained = {p.uid: [50, 100] for p in (*told[1:], *refill[1:])}
    tell(run.hook, Generated, prompts=everything, responses=trained, discarded=discarded)
    assert foretold(run) > 1.2 * planned, "the step's prediction is of all its prompts"
    after = policy.predict([*told, *refill])
    assert [prediction.tokens for prediction in after[4:]] == [30.0, 75.0, 75.0], "discarded groups teach"
    metrics = {}
    for found in run.hook.fuse_metrics(timeline=measured_step()):
        metrics |= found or {}
    assert metrics["fuse/elastic_upper_coverage"] == pytest.approx(10 / 14), "one of two in a to d, both in e to g"
    assert metrics["fuse/cost_per_million_tokens"] == pytest.approx(1e6 * 2 * 3 * 30.0 / 750), "per token trained"


def test_standalone_replicas_are_asked_for_where_time_pays_and_only_once_something_is_known():
    terms = {"cost_weight": 0.0, "hysteresis": 0.0, "standalone": 2, "standalone_timeout": 90.0}
    policy, run, told, first = learned(scale=True, **terms)
    assert run.asked == [None, ("standalone", {"most": 2, "launch_timeout": 90.0})]
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
    end(run.hook, 2, timeline)
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
    hook.fuse_setup(trainer=SimpleNamespace(block=settings.blocks.get, config=OmegaConf.create()))
    tell(hook, CheckpointSaved, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    wanted = prompts("a", "b")
    assert hook.fuse_predict(prompts=wanted) is None
    assert hook.fuse_scale(prompts=wanted, replicas=REPLICAS, most=3) is None
    assert hook.fuse_assign(prompts=wanted, replicas=REPLICAS, running={}) is None


def test_a_stranger_s_predictor_scaler_and_router_are_asked_first(installed_plugin):
    installed_plugin("acme", STRANGER)
    policy, _ = enabled()
    wanted = prompts("a", "abc")
    assert policy.predict(wanted) == [Prediction(1, 1), Prediction(3, 3)]
    assert policy.scale(wanted, REPLICAS, 3) == 1
    assert policy.assign(wanted, REPLICAS, {}) == {"uid-a": 2, "uid-abc": 2}
    assert policy.fallbacks == 0


def test_lengths_are_learned_whoever_routes(installed_plugin, tmp_path: Path):
    installed_plugin("acme", STRANGER)
    policy, run = enabled()
    begin(run.hook)
    wanted = prompts("a", "b")
    policy.assign(wanted, REPLICAS, {})
    told = {p.uid: replace(p, prediction=Prediction(4, 8)) for p in wanted}
    responses = {"uid-a": [3, 5], "uid-b": [7, 9], "replayed": [1]}
    tell(run.hook, Generated, prompts=told, responses=responses, discarded={})
    metrics = {}
    for found in run.hook.fuse_metrics(timeline=measured_step()):
        metrics |= found or {}
    assert metrics["fuse/elastic_upper_coverage"] == 0.75
    tell(run.hook, CheckpointSaved, folder=tmp_path)
    assert json.loads((tmp_path / "fuse_elastic.json").read_text())["lengths"]["means"] == {"a": 4.0, "b": 8.0}


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("source", "ask", "message"),
    [
        ("broken", lambda policy, found: policy.predict(found), "allowed: finite, 0 <= tokens <= upper"),
        ("greedy", lambda policy, found: policy.scale(found, REPLICAS, 3), "fuse_scale returned 7; allowed: 1 to 3 replicas"),
        ("lost", lambda policy, found: policy.assign(found, REPLICAS, {}), "fuse_assign returned 'uid-a': 9; allowed: prompts of"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_a_stranger_s_mistake_leaves_the_step_to_verl(installed_plugin, caplog, source, ask, message):
    installed_plugin("acme", STRANGER)
    policy, _ = enabled()
    assert ask(policy, prompts("a", "b", source=source)) is None
    assert policy.fallbacks == 1
    assert message in caplog.text
    assert "failed in step 2; the rest of this step runs as in stock verl" in caplog.text


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"name": "sglang"}}, "actor_rollout_ref.rollout.name='sglang': fuse.elastic.enabled=true needs vllm"),
        ({"rollout": {"full_determinism": True}}, "actor_rollout_ref.rollout.full_determinism=true: "),
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
# ruff: enable[E501]
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
