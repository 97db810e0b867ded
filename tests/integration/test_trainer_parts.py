"""The objects a trainer is made of, each alone: their neighbours are values or records of calls. verl
itself is imported, not run."""

import inspect
import json
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from ray.exceptions import GetTimeoutError
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils import tensordict_utils as tu

    from ci.bench.support.untrained import UntrainedTrainer
    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe
    from verl_fuse.errors import FuseError
    from verl_fuse.host import features
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.record import journal as journals
    from verl_fuse.host.record.accounting import prepare_accounts
    from verl_fuse.host.record.journal import Journal
    from verl_fuse.host.record.step import StockStage, TrainerPart
    from verl_fuse.host.rollout.director import Director
    from verl_fuse.host.rollout.finished import Finished
    from verl_fuse.host.rollout.lengths import LengthTotals
    from verl_fuse.host.rollout.policy import PolicyGuard, plugin_metrics
    from verl_fuse.host.rollout.watch import Groups
    from verl_fuse.host.start.begin import checked_settings
    from verl_fuse.host.start.compat import lock, start
    from verl_fuse.host.trainer import FuseTrainer
    from verl_fuse_elastic.standalone import sync
    from verl_fuse_elastic.standalone.sync import StandaloneSync
    from verl_fuse_interstage.slices import refresh
    from verl_fuse_pipeline.fused import FusedUpdates
    from verl_fuse_update import parts as update_parts
    from verl_fuse_update.critic.driver import CriticFirst
    from verl_fuse_update.lean.options import LeanOptions

from verl_fuse.hookspecs import Trainer
from verl_fuse.spec.step import LaneView, Migration, ReplicaView
from verl_fuse.spec.timeline import Span, Timeline

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


class Hook:
    """The hooks as observers and policies see them."""

    def __init__(self):
        self.events, self.decision, self.keys = [], None, []

    def fuse_event(self, event):
        self.events.append(event)

    def fuse_migration(self, view):
        decision, self.decision = self.decision, None
        return decision

    def fuse_infer_next(self, view, lane):
        return self.keys.pop(0) if self.keys else None


class Calls:
    """A record of the calls on it, in order; `answers` by name."""

    def __init__(self, **answers):
        self.seen, self._answers = [], answers

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.seen.append((name, *args))
            return self._answers.get(name)

        return call


@pytest.fixture
def hook():
    return Hook()


@pytest.fixture
def journal(hook):
    journal = Journal(hook, collector=None)
    journal.begin_step(3, prompts=2, samples_each=2)
    return journal


def tag(length):
    return {"prompt_len": 5, "response_len": length, "seq_len": 5 + length, "status": "success"}


# ---------------------------------------------------------------- journal


def test_a_collector_that_does_not_answer_costs_its_spans_and_no_run(hook, monkeypatch, caplog):
    def late(asked, timeout: float):
        raise GetTimeoutError("not ready")

    monkeypatch.setattr(journals, "ray", SimpleNamespace(get=late))
    journal = Journal(hook, SimpleNamespace(drain=SimpleNamespace(remote=lambda: None)))
    journal.begin_step(3, prompts=2, samples_each=2)
    with journal.stage("drain"):
        pass
    journal.step.end = journal.step.clock.now
    timeline = journal.timeline("run", lambda span: span)
    assert [span.name for span in timeline.spans] == ["drain"]
    assert "the timeline has the driver's spans alone: GetTimeoutError: not ready" in caplog.text


def test_a_plugin_whose_metrics_fail_costs_its_own_metrics_alone(caplog):
    def failing(timeline):
        raise ZeroDivisionError("no request")

    impls = [
        SimpleNamespace(plugin_name=name, function=function, argnames=argnames)
        for name, function, argnames in (
            ("acme", failing, ("timeline",)),
            ("other", lambda: {"other/steps": 1.0}, ()),
            ("number", lambda timeline: 3, ("timeline",)),
            ("none", lambda timeline: None, ("timeline",)),
            ("step", lambda timeline: {"step": float(timeline.step)}, ("timeline",)),
        )
    ]
    hook = SimpleNamespace(fuse_metrics=SimpleNamespace(get_hookimpls=lambda: impls))
    found = plugin_metrics(hook, Timeline("run", 7, 0.0, 1.0, ()))
    assert found == ({"other/steps": 1.0, "step": 7.0}, 2)
    assert "fuse_metrics of plugin acme failed in step 7" in caplog.text


def test_a_stage_is_an_event_and_a_span_of_its_step(journal, hook):
    with pytest.raises(RuntimeError), journal.stage("drain"):
        raise RuntimeError
    with journal.stage("update_weights", "sync"):
        pass
    assert [(event.step, event.name) for event in hook.events] == [(3, "drain"), (3, "update_weights")]
    failed, done = journal.step.spans
    assert (failed.name, failed.track, failed.args["error"]) == ("drain", "step", "RuntimeError")
    assert (done.name, done.category) == ("update_weights", "sync")
    journal.begin_step(4, prompts=2, samples_each=2)
    assert journal.step.spans == []


def test_the_first_span_of_a_planned_stage_says_what_was_planned(hook, monkeypatch):
    collector = SimpleNamespace(drain=SimpleNamespace(remote=lambda: []))
    monkeypatch.setattr(journals, "NodeClocks", lambda: SimpleNamespace(offsets=lambda nodes: {}))
    monkeypatch.setattr(journals, "ray", SimpleNamespace(get=lambda reference, timeout: reference))
    foreseen = {"values": 2.0, "update_critic": 3.0, "gen": 4.0}
    journal = Journal(hook, collector, foreseen)
    journal.begin_step(3, prompts=2, samples_each=2)
    with (
        journal.recorder.span("update_critic", "lane critic", "train"),
        journal.recorder.span("gen", "replica 0", "other"),
    ):
        pass
    with journal.recorder.span("values", "lane train", "inference"), journal.stage("values"):
        pass
    journal.step.end = journal.step.clock.now
    timeline = journal.timeline("run", lambda span: span)
    said = {(span.name, span.track): span.args["planned_seconds"] for span in timeline.spans if span.args}
    assert said == {("values", "step"): 2.0, ("update_critic", "lane critic"): 3.0}
    planned = {key: value for key, value in journal.metrics(timeline).items() if "planned" in key}
    assert planned == {f"fuse/planned_seconds/{name}": value for name, value in foreseen.items()}


def test_the_timeline_has_the_spans_of_all_processes_that_meet_the_step(journal, monkeypatch):
    start = journal.step.clock.start
    old, remote = Span("old", "rank 0", "other", start - 9, start - 8), Span("far", "rank 1", "other", start, start + 1)
    # Its node's clock is an hour ahead.
    ahead = Span("ahead", "rank 2", "other", start + 3600.5, start + 3601)
    spans = [(old, "here"), (remote, "here"), (ahead, "there")]
    collector = SimpleNamespace(drain=SimpleNamespace(remote=lambda: spans))
    clocks = SimpleNamespace(offsets=lambda nodes: {node: {"here": 0.0, "there": 3600.0}[node] for node in nodes})
    monkeypatch.setattr(journals, "NodeClocks", lambda: clocks)
    monkeypatch.setattr(journals, "ray", SimpleNamespace(get=lambda reference, timeout: reference))
    journal._collector = collector
    with journal.stage("balance"):
        pass
    journal.step.end = start + 2
    timeline = journal.timeline("run", lambda span: span)
    assert [span.name for span in timeline.spans] == ["far", "ahead", "balance"]
    (found,) = timeline.on("rank 2")
    assert (found.start - start, found.end - start) == pytest.approx((0.5, 1.0), abs=1e-5)
    assert (timeline.run, timeline.step, timeline.end) == ("run", 3, start + 2)
    metrics = journal.metrics(timeline)
    assert metrics.keys() == {"timing_s/balance", "fuse/account_write_failures"}


def test_an_account_is_checked_kept_and_written(journal, tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "prompt_indices", lambda batch: [7])
    tags = [tag(2) | {"min_global_steps": 2, "max_global_steps": 2} for _ in range(2)]
    (tmp_path / "accounts").mkdir()
    batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=tags, partition_id="train")
    metrics = journal.account(tmp_path, batch, False, 4)
    assert metrics["fuse/samples_trained"] == 2
    assert metrics["fuse/samples_missing"] == 2
    assert json.loads((tmp_path / "accounts/step_000003.json").read_text())["prompts"] == [7]
    assert journal.step.account.samples == 2
    (tmp_path / "accounts").rename(tmp_path / "gone")
    (tmp_path / "accounts").write_text("")
    replayed = [tag(2) | {"min_global_steps": 7, "max_global_steps": 7}]
    journal.account(tmp_path, KVBatchMeta(keys=["a_0_0"], tags=replayed, partition_id="train"), True, 4)
    journal.step.end = journal.step.clock.now
    assert journal.metrics(SimpleNamespace(on=lambda track: ()))["fuse/account_write_failures"] == 1
    with pytest.raises(FuseError, match=r"was generated under weights versions 7\.\.7"):
        journal.account(tmp_path, KVBatchMeta(keys=["a_0_0"], tags=replayed, partition_id="train"), False, 4)


@pytest.mark.parametrize(
    ("keys", "discarded", "missing"),
    [
        # As asked: one sample of a, three of b.
        (["a_0_0", "b_0_0", "b_1_0", "b_2_0"], {}, 0),
        # More than `samples_each` were asked of b: that one is missing is no matter of the mean.
        (["a_0_0", "b_0_0", "b_2_0"], {}, 1),
        # All of b, none of a, and the other way round.
        (["b_0_0", "b_1_0", "b_2_0"], {}, 1),
        (["a_0_0"], {}, 3),
        # c was asked for in the place of a, which dynamic sampling discarded.
        (["b_0_0", "b_1_0", "b_2_0", "c_0_0"], {"a": [3]}, 3),
        # A group replayed from disk was not asked for.
        (["z_0_0", "b_0_0", "b_1_0", "b_2_0"], {"a": [3]}, 1),
    ],
)
def test_what_is_missing_is_counted_by_what_each_prompt_asked_for(
    journal, tmp_path, monkeypatch, keys, discarded, missing
):
    monkeypatch.setattr(journals, "prompt_indices", lambda batch: [])
    (tmp_path / "accounts").mkdir()
    journal.step.ask({"a": 1, "b": 3})
    journal.step.ask({"c": 4})
    tags = [tag(2) | {"min_global_steps": 2, "max_global_steps": 2} for _ in keys]
    expected = journal.step.expected_of({key.partition("_")[0] for key in keys}, discarded)
    metrics = journal.account(tmp_path, KVBatchMeta(keys=keys, tags=tags, partition_id="train"), False, expected)
    assert (metrics["fuse/samples_trained"], metrics["fuse/samples_missing"]) == (len(keys), missing)


# ---------------------------------------------------------------- trainer


@pytest.fixture(scope="module")
def recipe():
    ones = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    plain = ["actor_rollout_ref.rollout.n=2", "fuse.disabled_plugins=[observe]", "~fuse.observe"]
    config = compose(find_recipe("ppo-cpu"), [*plain, *(f"{key}=1" for key in ones)])
    OmegaConf.resolve(config)
    return config


@pytest.fixture
def config(recipe, monkeypatch, tmp_path):
    """The configuration of a run of one prompt a step with two samples."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = recipe.copy()
    config.trainer.default_local_dir = config.fuse.run_dir = str(tmp_path)
    prepare_accounts(tmp_path)
    return config


@pytest.fixture
def untrained(config):
    """A trainer of mode `fuse` in its third step; its workers and its only part are one record of calls."""
    trainer = UntrainedTrainer(config, 3, None, 1, ())
    record = Calls()
    record._dispatch_info = {"actor": [0]}
    record.prompts = {}
    trainer.inference = trainer.critic_wg = trainer.actor_rollout_wg = trainer.checkpoint_callback = record
    trainer.director = SimpleNamespace(routing=record, finish=record.finish, inference_of=lambda stage: None)
    trainer.train_dataloader = SimpleNamespace(state_dict=dict)
    trainer.parts = [record]
    trainer.journal.begin_step(3, prompts=1, samples_each=2)
    with Lane("train", trainer.journal.recorder, 9.0) as trainer.lane:
        yield trainer


@pytest.mark.parametrize(
    ("enable", "steps", "first", "last", "trained"),
    [
        (False, [3], 2, 2, True),
        (False, [3], 1, 2, False),
        (False, [3], 2, 3, False),
        (True, [1, 4], 1, 1, False),
        # Replayed from disk, of any weights.
        (True, [1, 3], 1, 1, True),
    ],
)
def test_a_trainer_trains_on_samples_of_the_step_before_alone(
    untrained, monkeypatch, enable, steps, first, last, trained
):
    monkeypatch.setattr(journals, "prompt_indices", lambda batch: [7])
    untrained.config.skip.rollout_tq.enable, untrained.config.skip.rollout_tq.steps = enable, steps
    tags = [tag(2) | {"min_global_steps": 2, "max_global_steps": 2} for _ in range(2)]
    tags[1] |= {"min_global_steps": first, "max_global_steps": last}
    batch, metrics = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=tags, partition_id="train"), {}
    if trained:
        untrained._balance_batch(batch, metrics)
        assert (metrics["fuse/samples_trained"], metrics["fuse/samples_missing"]) == (2, 0)
    else:
        with pytest.raises(FuseError, match=rf"step 3: sample a_1_0 .* versions {first}\.\.{last}, .* needs 2"):
            untrained._balance_batch(batch, metrics)


def test_a_run_whose_loss_is_not_the_one_that_was_read_does_not_start(config, monkeypatch):
    config.fuse["update"].skip_zero_gradient = True
    config.actor_rollout_ref.actor.use_kl_loss = False
    # What is read of other packages takes longer, and has no losses.
    monkeypatch.setattr(start, "PACKAGES", ("verl",))
    read = lock.read

    def other_loss(file: Path) -> dict[str, lock.Locked]:
        found, name = read(file), "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla"
        return found | ({name: replace(found[name], read=("0123456789abcdef",))} if name in found else {})

    monkeypatch.setattr(lock, "read", other_loss)
    with pytest.raises(FuseError, match="compute_policy_loss_vanilla: body changed: fingerprint was 0123456789abcdef"):
        FuseTrainer(config)
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "gpg"
    assert checked_settings(config).run_dir == Path(config.fuse.run_dir)


def test_a_checkpoint_waits_for_what_is_still_under_way(untrained):
    untrained._save_checkpoint()
    calls = [call[0] for call in untrained.parts[0].seen]
    assert calls == ["settle", "save_checkpoint", "save_checkpoint", "on_save"], "a deferred critic, for instance"


def test_a_validation_waits_for_what_is_still_under_way(untrained):
    untrained.on_validate_begin()
    assert untrained.parts[0].seen == [("settle",)]


@pytest.mark.parametrize(("test_freq", "steps", "waits"), [(3, 9, True), (2, 9, False), (-1, 9, False), (-1, 3, True)])
def test_a_step_that_is_validated_or_the_last_ends_when_nothing_is_under_way(
    untrained, monkeypatch, test_freq, steps, waits
):
    untrained.config.trainer.test_freq, untrained.total_training_steps = test_freq, steps
    for name in ("_require_replicas", "_sync_weights"):
        monkeypatch.setattr(untrained, name, lambda *_: None)
    untrained.replicas = Calls()
    ended = []
    monkeypatch.setattr(untrained.parts[0], "settle", lambda: ended.append(untrained.journal.step.end), raising=False)
    untrained.on_step_end()
    assert ended == ([0.0] if waits else []), "before the step's end is noted"
    assert untrained.journal.step.end > 0


# ---------------------------------------------------------------- director


@pytest.fixture
def replicas():
    views = tuple(ReplicaView(rank, running=2, slots=4, routed=True) for rank in range(2))

    class Replicas(Calls):
        freed = ()

        def free(self, ranks, cause):
            self.seen.append(("free", ranks, cause))
            self.freed = tuple(ranks)

    return Replicas(watched=views, views=views, all_live=True)


@pytest.fixture
def inference():
    lanes = (LaneView("train", ("ref",), 0, 1),)

    class Inference(Calls):
        taken = frozenset()

    return Inference(view=lanes)


@pytest.fixture
def director(journal, hook, replicas, inference):
    return Director(journal, PolicyGuard(hook), replicas, inference, [Calls()])


def test_the_parts_are_told_what_is_discarded_and_asked_for_failures(director, inference):
    (part,) = director._parts
    director.discard(["a_0_0"])
    director.look(watch())
    assert inference.seen[0] == ("discard", ["a_0_0"])
    assert part.seen == [("discard", ["a_0_0"]), ("check",)]


def watch(*keys, missing=None):
    finished = Finished()
    finished.update({key: tag(3) for key in keys})
    groups, found = Groups(2, 0, 0), missing or {}
    return SimpleNamespace(finished=finished, groups=groups, discarded={}, missing=lambda samples_of: found)


def prompts(**samples):
    """A batch of one prompt for each of `samples`, with the number of samples that it asks for (None: it does not)."""
    columns = {"uid": list(samples), "__rollout_n__": list(samples.values())}
    if None in samples.values():
        del columns["__rollout_n__"]
    return tu.get_tensordict({name: np.array(column, dtype=object) for name, column in columns.items()})


def test_policies_see_the_rollout_and_their_decisions_are_carried_out(director, hook, replicas, inference):
    hook.decision, hook.keys = Migration((1,), cause="a test"), [["a_0_0"]]
    director.look(watch("a_0_0", "b_0_0", missing={"b": 1}))
    polled, migrated = hook.events
    assert (polled.view.step, polled.view.expected, polled.view.finished, polled.view.unfinished) == (3, 4, 2, 1)
    assert [sample.key for sample in polled.view.ready] == ["a_0_0", "b_0_0"]
    assert ("free", [0], "a test") in replicas.seen
    assert list(migrated.survivors) == [1]
    assert list(migrated.freed) == [0]
    assert [call[1] for call in inference.seen if call[0] == "submit"] == [["a_0_0"]]
    assert ("expect", 1, LengthTotals(2, 10, 6, 3), None) in replicas.seen


@pytest.mark.parametrize(
    ("first", "more", "expected"),
    [
        ({"a": None, "b": None}, {"c": None}, [4, 6, 4, 4]),
        # Each prompt asks for samples of its own: fewer and more than the run's two.
        ({"a": 1, "b": 1}, {"c": 3}, [2, 5, 4, 2]),
        ({"a": 4, "b": 5}, {"c": 1}, [9, 10, 9, 9]),
    ],
)
def test_samples_asked_for_beside_the_step_s_own_are_expected_and_discarded_ones_until_they_are_replaced(
    director, hook, replicas, first, more, expected
):
    seen = watch()
    director.submit(prompts(**first), seen)
    assert ("expect", expected[0]) in replicas.seen
    director.look(seen)
    director.submit(prompts(**more), seen)
    director.look(watch("a_0_0"))
    for discarded in ({"a": [3]}, {"a": [3], "c": [4]}):
        seen = watch("b_0_0")
        seen.discarded, seen.groups = discarded, Groups(len(discarded), 0, 0)
        director.look(seen)
    views = [event.view for event in hook.events if event.__class__.__name__ == "Polled"]
    assert [view.expected for view in views] == expected
    assert [view.unfinished for view in views] == [expected[0], *(each - 1 for each in expected[1:])]


def test_samples_that_vanish_while_they_are_in_inference_end_the_run(director, inference):
    inference.taken = frozenset({"a_0_0", "b_0_0"})
    discarded = watch("a_0_0")
    discarded.discarded = {"b": [3]}
    director.look(discarded)
    with pytest.raises(FuseError, match="step 3: 1 samples were dropped while they were in inference, first b_0_0"):
        director.look(watch("a_0_0"))


def test_nothing_moves_to_a_replica_that_is_dead(director, hook, replicas):
    replicas._answers["all_live"] = False
    hook.decision = Migration((1,))
    director.look(watch())
    assert not any(call[0] == "free" for call in replicas.seen)


def test_a_look_at_which_nothing_has_changed_asks_nobody(director, hook):
    director.look(watch("a_0_0"))
    director.look(watch("a_0_0"))
    assert len(hook.events) == 1


def test_routing_is_asked_before_prompts_are_submitted(director, hook, replicas, journal):
    director.routing = Calls()
    uids, sources = np.array(["a", "b"], object), np.array(["math", "code"], object)
    batch = tu.get_tensordict({"uid": uids, "data_source": sources})
    seen = watch()
    director.submit(batch, seen)
    assert director.routing.seen == [("submit", batch, director.policy, seen, {})]
    assert journal.step.sources == {"a": "math", "b": "code"}
    assert hook.events[-1].prompts == {"math": 1, "code": 1}
    assert replicas.seen == [("expect", 4)]


# ---------------------------------------------------------------- parts


def run_stage(name, category, work):
    return (name, category, work())


def test_standalone_replicas_load_what_was_left_before_the_sync():
    pool = Calls(take_in=True)
    part = StandaloneSync(pool, run_stage, lambda: ["bucket"])
    part.before_weight_sync(5)
    assert [call[0] for call in pool.seen] == ["take_in"]
    part.after_weight_sync(5)
    assert pool.seen[-1] == ("load", ("export_whole", "sync", ["bucket"]), 5)
    pool._answers["take_in"] = False
    part.before_weight_sync(6)
    part.after_weight_sync(6)
    assert [call[0] for call in pool.seen] == ["take_in", "load", "take_in"]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("method", "stage"),
    [
        ("_compute_old_log_prob", "old_log_prob"),
        ("_compute_ref_log_prob", "ref"),
        ("_compute_values", "values"),
        ("_update_critic", "update_critic"),
        ("_update_actor", "update_actor"),
    ],
)
def test_a_stage_goes_through_all_parts_and_runs_on_the_lane_of_the_training_workers(
    untrained, monkeypatch, method, stage, place
):
    done, metrics = [], {}

    class Part(TrainerPart):
        def __init__(self, name):
            self.name = name

        def around(self, stage, batch, metrics, stock):
            done.append(f"{self.name} begins {stage}")
            batch = stock(batch, metrics)
            done.append(f"{self.name} ends")
            return batch

    class Other(TrainerPart):
        def around(self, stage, batch, metrics, stock):
            return stock(batch, metrics, stock.method)

    def stock(self, batch, metrics):
        done.append(threading.current_thread().name)
        metrics["loss"] = 1.0
        return f"{batch} trained"

    monkeypatch.setattr(PPOTrainerSync, method, stock)
    untrained.parts = [Part("first"), Part("last")]
    assert getattr(untrained, method)("batch", metrics) == "batch trained"
    begins = [f"{name} begins {stage}" for name in ("last", "first")]
    assert done == [*begins, "verl-fuse lane train", "first ends", "last ends"]
    assert metrics == {"loss": 1.0}
    assert [span.name for span in untrained.journal.step.spans if span.track == "step"] == [stage]
    done.clear()
    untrained.parts.insert(place, Other())
    assert getattr(untrained, method)("batch", metrics) == "batch trained"
    assert done == [*begins, "MainThread", "first ends", "last ends"], "verl's method by itself, in the others' midst"


def test_the_actor_s_turn_does_nothing_once_it_was_updated_with_the_critic():
    config = OmegaConf.create({"trainer": {"critic_warmup": 2}})
    trainer, stages, batch = SimpleNamespace(config=config, global_steps=1), [], batch_of("a")
    updates = FusedUpdates(trainer, {}, lambda name, category, work: stages.append(name), lambda problem: None, 1.0)

    def turn(stage):
        return StockStage(stage, len, lambda batch, metrics: stages.append(stage), [updates])(batch, {})

    turns = ["ref", "update_critic", "update_actor"]
    assert [turn(stage) for stage in turns] == [None] * 3
    assert stages == turns, "the critic warms up"
    trainer.global_steps = 2
    stages.clear()
    assert [turn(stage) for stage in turns] == [None, batch, batch]
    assert turn("update_actor") is None
    assert stages == ["ref", "fused_update", "update_actor"]


def test_a_critic_that_is_updated_first_has_no_turn_of_its_own(monkeypatch):
    first, done, batch = CriticFirst(None, None), [], batch_of("a")

    def turn(stage):
        return StockStage(stage, len, lambda batch, metrics: done.append("verl's"), [first])(batch, {})

    for able in (True, False):
        monkeypatch.setattr(
            first, "train", lambda batch, metrics, values, critic, able=able: setattr(first, "trained", able) or able
        )
        done.clear()
        found = [turn(stage) for stage in ("ref", "values", "update_critic", "update_actor")]
        assert found == ([None, batch, batch, None] if able else [None] * 4)
        assert len(done) == (2 if able else 4)


def batch_of(*keys):
    return KVBatchMeta(keys=list(keys), tags=[{}], partition_id="train", extra_info={"temperature": 1.0})


# ---------------------------------------------------------------- features


def test_plugins_get_what_the_contract_says_with_its_arguments():
    members = {name: member for name, member in vars(Trainer).items() if not name.startswith("_")}
    assert len(members) == 9
    for name, member in members.items():
        ours = vars(features.Features)[name]
        assert isinstance(ours, property) == isinstance(member, property), name
        if not isinstance(member, property):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(member).parameters), name


@pytest.fixture
def trainer(journal, monkeypatch):
    """Return a trainer on which features are built; `built` lists the built parts, in order."""
    rollout = {"n": 4}
    trainer = SimpleNamespace(
        config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "algorithm": {}}),
        settings=SimpleNamespace(blocks={"observe": "its block"}, core=SimpleNamespace(replica_timeout=9.0)),
        replicas=SimpleNamespace(views=lambda: ("a view",), devices_each=2),
        llm_server_manager="manager",
        director=SimpleNamespace(routing="verl's"),
        inference=Calls(),
        client_options={},
        parts=[],
        journal=journal,
        lane="lane",
        run_stage=run_stage,
        actor_rollout_wg="actor",
        built=[],
    )

    class Routing(Calls):
        def __init__(self, *args):
            super().__init__()
            trainer.built.append(("routing", *args[2:]))

    groups = {"actor": "actor", "critic": "critic"}
    monkeypatch.setattr(features, "Routing", Routing)
    monkeypatch.setattr(refresh, "_built", lambda host, stages: Calls(lanes=("slice 0",)))
    monkeypatch.setattr(features.assembly, "training_groups", lambda trainer: groups)
    monkeypatch.setattr(refresh, "exports_on_devices", lambda config: False)
    monkeypatch.setattr(features.assembly, "extra_info", lambda trainer: {"temperature": 1.0})
    return trainer


def test_features_tell_of_the_run(trainer):
    run = features.Features(trainer)
    assert (run.block("observe"), run.replica_views(), run.devices_each) == ("its block", ("a view",), 2)
    assert run.config is trainer.config


def test_training_ranks_are_asked_for_their_memory_model_by_model(trainer, monkeypatch):
    groups = {model: SimpleNamespace(report_memory=lambda model=model: [f"{model}'s"]) for model in ("actor", "critic")}
    monkeypatch.setattr(features.assembly, "training_groups", lambda trainer: groups)
    with Lane("train", trainer.journal.recorder, 9.0) as trainer.lane:
        assert features.Features(trainer).training_memory() == {"actor": ["actor's"], "critic": ["critic's"]}


def test_a_feature_that_is_switched_on_is_a_part(trainer, monkeypatch):
    run = features.Features(trainer)
    assert trainer.parts == []
    run.add_part(partial(refresh.with_slices, stages=("ref",), share_prompts=True))
    assert trainer.inference.seen[0] == ("use_slices", ("slice 0",), True)
    run.add_part(lambda host, groups: FusedUpdates(host, groups, host.run_stage, lambda problem: None, 5.0))
    kinds = [type(part).__name__ for part in trainer.parts]
    assert kinds == ["SliceRefresh", "FusedUpdates"]
    monkeypatch.setattr(trainer, "actor_rollout_wg", SimpleNamespace(shares_prompts=lambda: [True, False]))
    trainer.critic_wg = SimpleNamespace(shares_prompts=lambda: [True, True])
    with Lane("train", trainer.journal.recorder, 9.0) as trainer.lane:
        assert not run.shares_prompts(), "one rank's model is as it was"
        assert run.shares_prompts("critic")
    options = LeanOptions(True, False, "computed")
    run.add_part(update_parts.own_values)
    run.add_part(partial(update_parts.lean, options=options, balance=False, share=True))
    run.add_part(partial(update_parts.balanced, models=["critic"]))
    run.add_part(partial(update_parts.shared, models=["actor"], places=["actor"], balance=False))
    names = [type(part).__name__ for part in trainer.parts[-4:]]
    assert names == ["CriticFirst", "LeanUpdates", "BalancedUpdates", "PlacedPrompts"]
    assert trainer.parts[-3]._options == options


def test_slices_get_weights_before_the_replicas_wake_where_an_export_needs_a_device(trainer, monkeypatch):
    for on_devices in (True, False):
        monkeypatch.setattr(refresh, "exports_on_devices", lambda config, found=on_devices: found)
        features.Features(trainer).add_part(partial(refresh.with_slices, stages=("ref",), share_prompts=False))
        assert trainer.parts[-1]._on_devices is on_devices


def test_standalone_replicas_are_taken_from_a_pool_that_the_routing_asks(trainer, monkeypatch):
    trainer.settings.core.weight_sync_timeout = 7.0
    trainer.config.actor_rollout_ref = {
        "rollout": {"n": 4, "n_gpus_per_node": 8, "checkpoint_engine": {"backend": "nccl"}},
        "model": {"path": "a model"},
    }
    made = []
    trainer.llm_server_manager = SimpleNamespace(
        rollout_replica_class=lambda **named: made.append(named) or "a replica"
    )
    trainer.replicas.addresses = {0: "a", 1: "b"}
    run = features.Features(trainer)
    run.use_routing(16)
    run.add_part(partial(sync.with_pool, most=2, launch_timeout=60.0))
    assert trainer.client_options == {"warm_prefix_tokens": 16, "standalone": 2}
    (asked,) = trainer.director.routing.seen
    pool = asked[1]
    assert (asked[0], pool.most, pool._launch_timeout, pool._load_timeout, pool._next) == ("use_pool", 2, 60.0, 7.0, 2)
    assert pool._build(2) == "a replica"
    assert (made[0]["replica_rank"], made[0]["gpus_per_node"], made[0]["model_config"].path) == (2, 8, "a model")
    assert made[0]["config"].checkpoint_engine.backend == "naive", "its engine is offered weights from outside"
    assert trainer.config.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"
    assert [type(part).__name__ for part in trainer.parts] == ["StandaloneSync"]
    actor = SimpleNamespace(export_whole=lambda: [["a", "c"], ["b"]])
    assert sync.exported_whole(actor) == ["a", "b", "c"], "in turns"
