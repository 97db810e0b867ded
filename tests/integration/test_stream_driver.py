"""The driver's part of a streamed update, alone: the guard, and which ranks get which rows. verl itself is imported,
not run."""

import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import ray
    import torch

    from verl_fuse.host.inference.lane import Lane
    from verl_fuse_update.stream import driver
    from verl_fuse_update.stream.driver import StreamedUpdates
    from verl_fuse_update.stream.guard import StreamedRow, difference
    from verl_fuse_update.stream.lanes import StreamLanes, answers_together, dealt
    from verl_fuse_update.stream.options import ORDER

from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Recorder
from verl_fuse.spec.step import Sample
from verl_fuse_update.lean.options import LeanOptions

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


def row(*advantages: float, mask: tuple[int, ...] = ()) -> StreamedRow:
    return StreamedRow(torch.tensor(advantages), torch.tensor(mask or [1] * len(advantages)))


STREAMED = {"a_0_0": row(0.5, 0.5), "a_1_0": row(-0.5)}
BATCH = STREAMED | {"b_0_0": row(1.0)}


def test_the_guard_lets_rounding_pass_and_nothing_else():
    assert difference(STREAMED, BATCH) is None
    assert difference(STREAMED, BATCH | {"a_1_0": row(-0.5000001)}) is None
    assert difference({}, BATCH) is None


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"a_0_0": STREAMED["a_0_0"]}, "1 streamed samples are not in the batch, first a_1_0"),
        (BATCH | {"a_2_0": row(0.0)}, "1 samples of streamed groups were added, first a_2_0"),
        (BATCH | {"a_1_0": row(-0.5001)}, "the advantage of sample a_1_0 was -0.5 and is -0.5001"),
        (BATCH | {"a_1_0": row(0.0)}, "the advantage of sample a_1_0 was -0.5 and is 0"),
        (BATCH | {"a_0_0": row(0.5, 0.5, mask=(1, 0))}, "sample a_0_0 has other tokens that count"),
        (BATCH | {"a_1_0": row(-0.5, -0.5)}, "sample a_1_0 has other tokens that count"),
    ],
)
def test_the_guard_names_what_differs(batch: dict[str, StreamedRow], said: str):
    assert difference(STREAMED, batch) == said


def test_rows_are_dealt_evenly_and_a_rank_may_have_none():
    assert dealt({"a": 9}, 2) == [["a"], []]
    assert dealt({}, 2) == [[], []]
    parts = dealt({"a": 90, "b": 10, "c": 80, "d": 10}, 2)
    assert sorted(key for part in parts for key in part) == ["a", "b", "c", "d"]
    assert all(len({"a", "c"} & set(part)) == 1 for part in parts)


@pytest.fixture
def lanes():
    made = StreamLanes(2, lambda number: Lane(f"update {number}", Recorder(lambda span: None), 10.0))
    yield made
    made.close()


def test_a_call_that_fails_is_told_and_ends_nothing(lanes: StreamLanes):
    def fails() -> None:
        raise MemoryError("no room")

    ran = []
    lanes.submit(1, fails, "call 0")
    lanes.submit(1, lambda: ran.append(1), "call 1")
    lanes.drain()
    assert ran == [1]
    assert lanes.failure == "call 0 failed: MemoryError: no room"


@pytest.fixture(scope="module")
def rank():
    """Makes a training rank, which computes, runs out of memory, or waits for a partner."""

    class Rank:
        def compute(self, what: str) -> None:
            if what == "out of memory":
                raise MemoryError("CUDA out of memory")
            if what == "waits":
                time.sleep(600)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray.remote(num_cpus=0)(Rank).remote
    ray.shutdown()


@pytest.mark.parametrize(
    ("others", "stranded"), [(["computes", "computes"], ""), (["out of memory"], ""), (["computes", "waits"], "8")]
)
def test_a_rank_that_fails_alone_ends_the_run_if_its_partners_wait_for_it(lanes, rank, others, stranded):
    group = [rank() for _ in range(1 + len(others))]
    calls = [each.compute.remote(what) for each, what in zip(group, ["out of memory", *others], strict=True)]
    made = updates(lanes, [])
    made.check()
    lanes.submit(0, lambda: answers_together(calls, range(6, 6 + len(calls)), 2.0), "call 0")
    try:
        if not stranded:
            made.after_inference(3)
            assert lanes.failure.startswith("call 0 failed: MemoryError: CUDA out of memory")
            return
        with pytest.raises(FuseError, match=rf"CUDA out of memory\), and its partners \(rank {stranded}\)"):
            made.after_inference(3)
        made._trainer.global_steps = 4
        with pytest.raises(FuseError, match=r"fuse\.update\.stream=false"):
            made.check()
    finally:
        for each in group:
            ray.kill(each)


def updates(lanes: StreamLanes, calls: list, warmup: int = 0, actor: dict | None = None) -> Any:
    """With workers that note what they are asked for."""
    config = {
        "trainer": {"critic_warmup": warmup},
        "data": {"train_batch_size": 2},
        "algorithm": {},
        "actor_rollout_ref": {
            "actor": {
                "ppo_mini_batch_size": 2,
                "use_kl_loss": False,
                "calculate_entropy": False,
                "entropy_coeff": 0.0,
                **(actor or {}),
            },
            "rollout": {"n": 2, "response_length": 8, "temperature": 1.0},
        },
    }
    trainer = SimpleNamespace(
        config=OmegaConf.create(config),
        global_steps=3,
        processor=None,
        actor_rollout_wg=SimpleNamespace(world_size=2),
        inference=SimpleNamespace(has_computed=lambda keys: "waits_0_0" not in keys),
        journal=SimpleNamespace(step=SimpleNamespace(samples_of=SAMPLES.get, clock=SimpleNamespace(now=0.0), spans=[])),
    )
    own = LeanOptions(skip_old_log_prob=True)
    made = StreamedUpdates(trainer, lambda *_, **__: None, own, lanes, 1, lambda batch, metrics: batch, True)
    made._stream = lambda now, number, tags: calls.append((number, sorted(tags)))  # type: ignore[method-assign]
    return made


SAMPLES = {"first": 2, "waits": 2, "then": 1}
WATCH: Any = SimpleNamespace(
    complete=lambda samples_of: {
        uid: [Sample(f"{uid}_{n}_0", uid, 2, 3) for n in range(samples_of(uid))] for uid in SAMPLES
    }
)
TAGS = {f"{uid}_{n}_0": {"seq_len": 5} for uid, count in SAMPLES.items() for n in range(count)}


def test_a_group_is_streamed_once_and_after_the_stages_it_goes_through(lanes: StreamLanes):
    calls: list = []
    made = updates(lanes, calls)
    assert [view.name for view in made.views({1})] == ["update 1"]
    assert [sample.key for sample in made.complete(WATCH)] == ["first_0_0", "first_1_0", "then_0_0"]
    made.stream(["first_0_0", "first_1_0"], TAGS, "update 1")
    assert [sample.group for sample in made.complete(WATCH)] == ["then"]
    made.after_inference(3)
    assert calls == [(1, ["first_0_0", "first_1_0"])]


def test_steps_that_do_not_train_the_actor_have_no_lane(lanes: StreamLanes):
    assert updates(lanes, [], warmup=4).views({0, 1}) == ()
    assert len(updates(lanes, [], warmup=3).views({0, 1})) == 2


def test_a_failure_is_that_of_its_step(lanes: StreamLanes):
    made = updates(lanes, [])
    made.check()
    lanes.failure = "call 0 failed"
    made.check()
    assert lanes.failure
    made._trainer.global_steps = 4
    made.check()
    assert lanes.failure == ""


@pytest.mark.parametrize(
    ("actor", "entropy", "more"),
    [
        ({}, False, []),
        ({"entropy_coeff": 0.1}, True, []),
        ({"calculate_entropy": True}, True, []),
        ({"use_kl_loss": True}, False, ["ref_log_prob"]),
    ],
)
def test_each_rank_gets_rows_of_its_own_and_one_without_any_gets_one_that_does_not_count(
    lanes: StreamLanes, monkeypatch, actor, entropy, more
):
    asked = []
    monkeypatch.setattr(driver, "on_ranks", lambda group, calls: asked.extend(calls))
    made = updates(lanes, [], actor=actor)
    tags = {"first_0_0": {"seq_len": 9}, "first_1_0": {"seq_len": 5}}
    made._call(range(2, 5), tags, {key: 1 for key in tags}, last=True)
    assert [(rank, method) for rank, method, _ in asked] == [(rank, "stream_rows") for rank in (2, 3, 4)]
    given = [batch for _, _, (batch,) in asked]
    assert [batch.keys for batch in given] == [["first_0_0"], ["first_1_0"], ["first_1_0"]]
    assert [batch.extra_info[ORDER].counts for batch in given] == [True, True, False]
    assert all(batch.extra_info[ORDER].last for batch in given)
    assert {batch.extra_info["calculate_entropy"] for batch in given} == {entropy}
    assert all(batch.fields[-1 - len(more) :] == ["advantages", *more] for batch in given)


def test_rows_of_padding_are_no_samples_of_a_streamed_group(lanes: StreamLanes):
    made = updates(lanes, [])
    made._own, made._now.handed, made._now.rows = True, {"a"}, dict(STREAMED)
    padded = BATCH | {"a_2_0": row(0.0)}
    for padding, said in ((True, None), (False, "1 samples of streamed groups were added, first a_2_0")):
        tags = [{"is_padding": padding and key == "a_2_0"} for key in padded]
        assert made._why_not(SimpleNamespace(keys=list(padded), tags=tags), padded) == said


def test_a_group_that_is_evicted_after_it_was_streamed_is_named(lanes: StreamLanes):
    made, done = updates(lanes, []), threading.Event()
    made._stream = lambda now, number, tags: done.set()
    made.stream(["first_0_0", "first_1_0"], TAGS, "update 0")
    made.discard(["then_0_0"])
    made._own = True
    assert made._why_not(SimpleNamespace(keys=[], tags=[]), {}) is None
    made.discard(["first_0_0", "first_1_0"])
    assert done.is_set(), "rows are read until the call is over"
    reason = made._why_not(SimpleNamespace(keys=[], tags=[]), {})
    assert reason == "group first was discarded after it was streamed"


def test_a_step_that_runs_a_pass_for_old_log_probs_keeps_no_gradient(lanes: StreamLanes):
    made = updates(lanes, [])
    made.stream(["first_0_0", "first_1_0"], TAGS, "update 0")
    assert "old log-probs" in made._why_not(SimpleNamespace(keys=[], tags=[]), {})
    lanes.failure = "call 0 failed"
    assert made._why_not(SimpleNamespace(keys=[], tags=[]), {}) == "call 0 failed"
