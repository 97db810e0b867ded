"""Streaming, barriers and the rollout watch on a real TransferQueue, with verl's own padding and replay buffer. Only
the models are missing: a stage writes numbers derived from each row's tokens, so that a row computed from the wrong
tokens, or not at all, shows."""

import contextlib
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")
tq = pytest.importorskip("transfer_queue")

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402

from verl_fuse.errors import FuseError  # noqa: E402
from verl_fuse.spec.trajectory import TrajectoryKey  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

LENGTHS = [5, 2, 9, 3, 7, 4, 6, 1]  # response tokens of the eight samples
PROMPT = 3
EOS = 0


@pytest.fixture(scope="module")
def queue():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.fixture
def batch(queue):
    """Eight finished samples in TransferQueue, as verl's agent loop leaves them."""
    keys = [f"u{i // 2}_{i % 2}_0" for i in range(len(LENGTHS))]
    responses = [torch.arange(1, n + 1) + 100 * i for i, n in enumerate(LENGTHS)]
    prompts = [torch.full((PROMPT,), 50 + i) for i in range(len(LENGTHS))]
    masks = [torch.ones(n, dtype=torch.int64) for n in LENGTHS]
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    fields = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
        "input_ids": nested(sequences),
        "attention_mask": nested([torch.ones_like(s) for s in sequences]),
        "position_ids": nested([torch.arange(len(s)) for s in sequences]),
        "rm_scores": nested([torch.zeros(n) for n in LENGTHS]),
        "rollout_log_probs": nested([torch.zeros(n) for n in LENGTHS]),
    }
    tags = [
        {"status": "success", "prompt_len": PROMPT, "response_len": n, "seq_len": PROMPT + n, "global_steps": 1}
        for n in LENGTHS
    ]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=len(keys)), tags=tags)
    yield KVBatchMeta(keys=keys, tags=tags, partition_id="train")
    everything = tq.kv_list("train") or {}
    tq.kv_clear(keys=list(everything.get("train", {})), partition_id="train")


class Model:
    """A stage: writes ten times each response token into `field`, and counts which rows it computed."""

    def __init__(self, field: str):
        self.field = field
        self.computed: Counter[str] = Counter()
        self.batches: list[list[str]] = []

    def __call__(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses"])
        values = nested([row.float() * 10 for row in data["responses"].unbind()])
        tq.kv_batch_put(
            keys=batch.keys, partition_id="train", fields=TensorDict({self.field: values}, batch_size=len(batch))
        )
        self.computed.update(batch.keys)
        self.batches.append(list(batch.keys))
        metrics["rows"] = len(batch)
        return batch


@pytest.fixture
def stages():
    return {"ref": Model("ref_log_prob"), "values": Model("values")}


@pytest.fixture
def inference(stages):
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.inference.samples import SampleInference
    from verl_fuse.host.record.spans import Recorder

    with Lane("train", Recorder(lambda span: None), timeout=60.0) as lane:
        yield SampleInference(
            lane=lane,
            calls=stages,
            dp_size=2,
            multiples={"ref": 2, "values": 2},
            fields={"ref": ("ref_log_prob",), "values": ("values",)},
            extra_info={"temperature": 1.0},
        )


def tags_of(batch):
    return dict(zip(batch.keys, batch.tags, strict=True))


def stored(batch, field):
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[field, "responses"])
    return [row.tolist() for row in data[field].unbind()], [(row * 10).tolist() for row in data["responses"].unbind()]


def whole(batch):
    return {"rows": len(batch), "whole": True}


def test_rows_of_a_discarded_group_stay_until_the_lane_that_has_them_is_done(inference, stages, batch):
    running, go_on, order = threading.Event(), threading.Event(), []
    compute = stages["ref"].__call__

    def slow(rows, metrics):
        running.set()
        assert go_on.wait(30)
        result = compute(rows, metrics)
        order.append("computed")
        return result

    inference._calls = {"ref": slow, "values": stages["values"]}
    inference.submit(batch.keys[:4], tags_of(batch))
    inference.submit(batch.keys[4:6], tags_of(batch))
    assert running.wait(30)
    discarding = threading.Thread(target=lambda: (inference.discard(batch.keys[:2]), order.append("discarded")))
    discarding.start()
    discarding.join(0.2)
    assert discarding.is_alive(), "it does not wait for the micro-group"
    go_on.set()
    discarding.join(30)
    assert order[:2] == ["computed", "discarded"] or order == ["computed", "computed", "discarded"]
    assert inference.discarded == 2
    # Of no lane: nothing to wait for, nothing in vain.
    inference.discard(batch.keys[6:])
    assert inference.discarded == 2
    tq.kv_clear(keys=batch.keys[:2], partition_id="train")
    kept = KVBatchMeta(keys=batch.keys[2:], tags=batch.tags[2:], partition_id="train")
    inference.complete("ref", kept, {}, whole)
    got, want = stored(kept, "ref_log_prob")
    assert got == want
    inference.begin_step()
    assert inference.discarded == 0


def test_with_nothing_streamed_a_barrier_is_one_stock_call_on_the_whole_batch(inference, stages, batch):
    metrics = {}
    assert inference.complete("ref", batch, metrics, whole) is batch
    assert stages["ref"].batches == [batch.keys]
    assert metrics == {"rows": 8}, "verl's own metrics, not recomputed ones"
    got, want = stored(batch, "ref_log_prob")
    assert got == want


def test_streamed_samples_are_computed_once_and_the_barrier_adds_the_rest(inference, stages, batch):
    inference.submit(batch.keys[2:6], tags_of(batch))
    assert inference.taken == frozenset(batch.keys[2:6])
    metrics = {}
    for stage, field in (("ref", "ref_log_prob"), ("values", "values")):
        inference.complete(stage, batch, metrics, whole)
        assert stages[stage].computed == Counter(batch.keys)
        got, want = stored(batch, field)
        assert got == want
    assert metrics["whole"] is True, "metrics of a batch computed in parts are recomputed over all of it"
    assert metrics["rows"] == 8


def test_micro_groups_put_a_like_share_of_long_samples_on_each_rank(inference, stages, batch):
    inference.submit(batch.keys[:4], tags_of(batch))
    inference.complete("ref", batch, {}, whole)
    # lengths 5 2 9 3 -> rank 0 gets 9 and 3, rank 1 gets 5 and 2
    assert stages["ref"].batches[0] == ["u1_0_0", "u1_1_0", "u0_0_0", "u0_1_0"]


def test_what_a_stage_leaves_in_extra_info_reaches_the_next_as_in_stock_verl(inference, stages, batch):
    seen = []

    class Reference(Model):
        def __call__(self, batch, metrics):
            batch.extra_info["no_lora_adapter"] = True
            return super().__call__(batch, metrics)

    class Critic(Model):
        def __call__(self, batch, metrics):
            seen.append(batch.extra_info.get("no_lora_adapter"))
            return super().__call__(batch, metrics)

    inference._calls |= {"ref": Reference("ref_log_prob"), "values": Critic("values")}
    inference.submit(batch.keys[:4], tags_of(batch))
    inference.complete("ref", batch, {}, whole)
    inference.complete("values", batch, {}, whole)
    assert seen == [True, True], "streamed and remaining rows alike"


def test_an_uneven_rest_is_topped_up_with_the_shortest_computed_rows(inference, stages, batch):
    from verl_fuse.host.inference.samples import top_up

    assert top_up([1, 2, 3], LENGTHS, 2) == [1, 2, 3, 7]
    assert top_up([1, 2, 3, 4], LENGTHS, 2) == [1, 2, 3, 4]
    assert top_up([1, 2, 3], LENGTHS, 16) == list(range(8))


def test_a_dropped_micro_group_is_caught(inference, batch, monkeypatch):
    def drop(index, keys, tags):
        for done in inference._done.values():
            done.update(keys)

    monkeypatch.setattr(inference, "_run", drop)
    inference.submit(batch.keys[:2], tags_of(batch))
    with pytest.raises(FuseError, match=r"stage 'ref': ref_log_prob is missing from at least one of 8 rows"):
        inference.complete("ref", batch, {}, whole)


def padded(batch):
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    larger = upsample_batch_to_divisible_size(batch, 6, EOS)
    assert len(larger) == 12
    return larger


def test_padding_rows_made_after_streaming_are_recomputed(inference, stages, batch):
    inference.submit(batch.keys[:2], tags_of(batch))
    inference._lane.drain()
    larger = padded(batch)
    inference.complete("ref", larger, {}, whole)
    got, want = stored(larger, "ref_log_prob")
    assert got == want
    assert stages["ref"].computed == Counter(larger.keys)


def test_a_padding_row_that_keeps_a_stale_field_is_caught(inference, batch):
    inference.submit(batch.keys, tags_of(batch))
    inference._lane.drain()
    larger = padded(batch)
    inference._done["ref"].update(larger.keys)  # as if padding needed no inference
    with pytest.raises(
        FuseError, match=r"ref_log_prob of 4 rows has the wrong length, first pad\w+: 5 values for 1 response"
    ):
        inference.complete("ref", larger, {}, whole)


def test_the_full_sequence_form_is_not_taken_for_the_response_form(inference, batch):
    class FullSequence(Model):
        def __call__(self, batch, metrics):
            data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["input_ids"])
            fields = TensorDict({"values": nested([r.float() for r in data["input_ids"].unbind()])}, len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
            return batch

    inference._calls["values"] = FullSequence("values")
    inference.submit(batch.keys[:4], tags_of(batch))
    with pytest.raises(
        FuseError, match=r"values of 8 rows has the wrong length, first u0_0_0: 8 values for 5 response"
    ):
        inference.complete("values", batch, {}, whole)


def test_a_failing_stage_ends_the_step_at_the_next_poll(inference, stages, batch):
    def fail(batch, metrics):
        raise RuntimeError("rank 1 died")

    inference._calls["ref"] = fail
    inference.submit(batch.keys[:2], tags_of(batch))
    with pytest.raises(RuntimeError, match="rank 1 died"):
        inference._lane.drain()
    with pytest.raises(FuseError, match="rank 1 died"):
        inference._lane.check()


class Slice:
    """Computes all stages of a micro-group in one call, as a slice's workers do; waits for `free` before it starts."""

    def __init__(self, stages):
        self.stages = stages
        self.batches: list[list[str]] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, keys, tags, stages):
        from verl_fuse.host.upstream.rows import rows

        assert self.free.wait(30)
        self.batches.append(list(keys))
        for stage in stages:
            self.stages[stage](rows(keys, tags, None), {})


@pytest.fixture
def slices(stages):
    return Slice(stages), Slice(stages)


@pytest.fixture
def sliced(stages, slices):
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.inference.samples import SampleInference, SliceLane
    from verl_fuse.host.record.spans import Recorder

    with contextlib.ExitStack() as lanes:

        def lane(name):
            return lanes.enter_context(Lane(name, Recorder(lambda span: None), timeout=60.0))

        inference = SampleInference(
            lane=lane("train"),
            calls=stages,
            dp_size=2,
            multiples={"ref": 2, "values": 2},
            fields={"ref": ("ref_log_prob",), "values": ("values",)},
            extra_info={"temperature": 1.0},
        )
        assert [view.name for view in inference.view(())] == ["train"]
        inference.use_slices(
            [SliceLane(lane(f"slice {n}"), one, dp_size=1, multiple=1) for n, one in enumerate(slices)]
        )
        yield inference


def test_slices_compute_all_stages_of_a_sample_once(sliced, slices, stages, batch):
    sliced.submit(batch.keys[:3], tags_of(batch), "slice 1")
    sliced.submit_rest(tags_of(batch))
    for stage, field in (("ref", "ref_log_prob"), ("values", "values")):
        sliced.complete(stage, batch, {}, whole)
        assert stages[stage].computed == Counter(batch.keys)
        got, want = stored(batch, field)
        assert got == want
    assert slices[1].batches[0] == ["u1_0_0", "u0_0_0", "u0_1_0"], "longest first"
    # Five samples are left, of 7, 6, 4, 3 and 1 response tokens: two micro-groups of two stages.
    assert len(slices[0].batches) + len(slices[1].batches[1:]) == 4


def test_a_barrier_waits_for_every_slice(sliced, slices, stages, batch):
    slices[0].free.clear()
    sliced.submit(batch.keys[:4], tags_of(batch), "slice 0")
    sliced.submit(batch.keys[4:], tags_of(batch), "slice 1")
    threading.Timer(0.5, slices[0].free.set).start()
    sliced.complete("ref", batch, {}, whole)
    assert stages["ref"].computed == Counter(batch.keys)
    assert len(stages["ref"].batches) == 2, "nothing was left to the training workers"


def test_a_slice_that_is_busy_leaves_the_rest_to_the_others(sliced, slices, stages, batch):
    slices[0].free.clear()
    sliced.submit(batch.keys[:4], tags_of(batch), "slice 0")
    sliced.submit_rest(tags_of(batch))
    deadline = time.monotonic() + 30
    while len(slices[1].batches) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    slices[0].free.set()
    sliced.drain()
    assert ([len(keys) for keys in slices[0].batches], len(slices[1].batches)) == ([4], 4)
    assert all(stage.computed == Counter(batch.keys) for stage in stages.values())


def test_slices_share_the_stages_of_the_last_samples(sliced, slices, stages, batch):
    slices[0].free.clear()
    sliced.submit(batch.keys[:7], tags_of(batch), "slice 1")
    sliced.drain()
    # One sample is one micro-group: each slice computes one of its two stages.
    sliced.submit_rest(tags_of(batch))
    deadline = time.monotonic() + 30
    while len(slices[1].batches) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    slices[0].free.set()
    for stage, field in (("ref", "ref_log_prob"), ("values", "values")):
        sliced.complete(stage, batch, {}, whole)
        assert stages[stage].computed == Counter(batch.keys)
        got, want = stored(batch, field)
        assert got == want
    assert slices[0].batches == slices[1].batches[1:] == [batch.keys[7:]]


def test_only_slices_of_released_replicas_are_offered(sliced):
    assert sliced.view(()) == ()
    (offered,) = sliced.view((1,))
    assert (offered.name, offered.multiple, offered.released) == ("slice 1", 1, True)


def test_a_failing_slice_ends_the_step_at_the_next_poll_and_is_named(sliced, slices, batch):
    slices[1].stages = {"ref": None}
    sliced.submit(batch.keys[:2], tags_of(batch), "slice 1")
    with pytest.raises(TypeError):
        sliced.drain()
    with pytest.raises(FuseError, match="lane 'slice 1': a call on its workers failed: 'NoneType' object"):
        sliced.check()


def test_the_rest_is_shared_by_tokens_longest_first():
    from verl_fuse.host.inference.samples import share

    lengths = {"a": 9, "b": 8, "c": 5, "d": 4, "e": 3, "f": 1}
    assert share(lengths, {"slice 0": 1, "slice 1": 1}) == {"slice 0": ["a", "d", "e"], "slice 1": ["b", "c", "f"]}
    assert share(lengths, {"slice 0": 2, "slice 1": 2}) == {"slice 0": ["a", "b"], "slice 1": ["c", "d", "e", "f"]}
    assert share({"a": 9, "b": 8, "c": 5}, {"slice 0": 2}) == {"slice 0": ["a", "b"]}
    assert share({}, {"slice 0": 2}) == {}


@pytest.fixture
def buffer(queue):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    return ReplayBuffer("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}))


def test_a_rollout_that_stands_still_ends_loudly_and_names_whom_it_waits_for(buffer, batch):
    from verl.utils.tensordict_utils import get_tensordict

    from verl_fuse.host.rollout.watch import RolloutObserver, RolloutWatch

    tq.kv_batch_put(
        keys=["u9"], partition_id="train", tags=[{"is_prompt": True, "status": "running", "global_steps": 1}]
    )
    # Groups that have ended are no samples.
    ended = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_batch_put(keys=["u0", "u1", "u2"], partition_id="train", tags=[dict(ended) for _ in range(3)])
    seen = []

    class Looking(RolloutObserver):
        def look(self, watch):
            seen.append((len(watch.finished), watch.groups))

    class Suspecting(RolloutObserver):
        def suspects(self, watch):
            return ["replica 1", *watch.unfinished]

    watch = RolloutWatch(buffer, 0.01, 1.0)
    watch.observers += [Looking(), Suspecting()]
    watch.submitted(get_tensordict({"uid": ["u9"], "data_source": ["gsm8k"], "extra_info": [{"index": 12}]}))
    with pytest.raises(
        FuseError,
        match=r"made no progress for 1 s: 8 samples finished, still waiting for 1 prompt groups: gsm8k index 12 "
        r"\(uid u9\); held up by: replica 1, u9 \(fuse",
    ):
        buffer.sample(global_steps=1, partition_id="train", batch_size=5)
    assert len(seen) > 5
    assert set(seen) == {(8, (4, 3, 0))}


def test_a_validation_that_stands_still_counts_samples_too(buffer, queue):
    """A session that left two trajectories is one sample."""
    from verl_fuse.host.rollout.watch import RolloutWatch

    tq.kv_batch_put(keys=["v1"], partition_id="val", tags=[{"is_prompt": True, "status": "running", "global_steps": 1}])
    left = {"status": "success", "prompt_len": 3, "response_len": 4}
    tq.kv_batch_put(keys=["v1_0_0", "v1_0_1"], partition_id="val", tags=[dict(left), dict(left)])
    RolloutWatch(buffer, 0.01, 1.0)
    with pytest.raises(
        FuseError,
        match=r": 1 samples finished, still waiting for 1 prompt groups: prompt \(uid v1\); held up by: none that is "
        r"dead or silent \(every process answers\) \(fuse",
    ):
        buffer.sample(global_steps=1, partition_id="val", batch_size=1)
    tq.kv_clear(partition_id="val", keys=["v1", "v1_0_0", "v1_0_1"])


def test_listing_alone_sets_the_pace_of_looks(buffer, batch, monkeypatch):
    from verl_fuse.host.rollout import watch

    cpu = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: cpu[0]))
    monkeypatch.setattr(buffer, "_wait_for_next_poll", lambda partition, last: paces.append(buffer.poll_interval))
    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", lambda: spend(listing[-1]))
    paces: list[float] = []
    listing: list[float] = []

    def spend(seconds):
        cpu[0] += seconds

    class Deciding(watch.RolloutObserver):
        def look(self, watch):
            spend(5.0)

    watch.RolloutWatch(buffer, 0.05, 60.0).observers.append(Deciding())
    for submission, listed in ((100.0, 0.001), (0.0, 0.001), (0.0, 0.03), (0.0, 3.0), (100.0, 0.001)):
        spend(submission)
        listing.append(listed)
        buffer._sync_metadata_from_transfer_queue()
        buffer._wait_for_next_poll("train", 0.0)
    assert paces == [0.05, 0.05, pytest.approx(1.47), 2.0, 0.05], "neither submission, also of more, nor decisions"


def test_policies_are_asked_when_something_happened_and_now_and_then(monkeypatch):
    from verl_fuse.host.rollout import watch

    now = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    glance = watch.Glance()
    asked = []
    for now[0], state in ((0.0, 1), (0.1, 1), (0.2, 2), (0.3, 2), (0.6, 2), (0.8, 2), (0.9, 2)):
        asked.append(glance.due(state))
    assert asked == [True, False, True, False, False, True, False]


def test_a_key_listed_before_its_data_is_not_ready(buffer, batch):
    from verl_fuse.host.rollout.watch import RolloutWatch

    tq.kv_batch_put(keys=["u9_0_0"], partition_id="train", tags=[{"status": "writing"}])
    watch = RolloutWatch(buffer, 0.01, 60.0)
    watch.look()
    assert sorted(watch.finished.tags) == sorted(batch.keys)


def test_a_group_is_complete_with_the_samples_that_its_prompt_asked_for(buffer, batch):
    from verl.utils.tensordict_utils import get_tensordict

    from verl_fuse.host.rollout.watch import RolloutObserver, RolloutWatch

    prompt = {"is_prompt": True, "global_steps": 1}
    tags = [{**prompt, "status": status} for status in ("finished", "finished", "finished", "running", "failure")]
    tq.kv_batch_put(keys=["u0", "u1", "u2", "u3", "u4"], partition_id="train", tags=tags)
    waits, forgotten = [], []

    class Waiting(RolloutObserver):
        def before_wait(self, watch):
            waits.append(watch.now())

        def forget(self):
            forgotten.append(len(waits))

    watch = RolloutWatch(buffer, 0.01, 60.0)
    watch.observers.append(Waiting())
    watch.look()
    asked = {"u0": 2, "u1": 3, "u2": 1, "u3": 2, "u4": 4}
    complete = watch.complete(asked.__getitem__)
    assert {uid: [sample.key for sample in found] for uid, found in complete.items()} == {"u0": ["u0_0_0", "u0_1_0"]}
    assert watch.missing(asked.__getitem__) == {"u1": 1, "u4": 4}, "u3 may still have another"
    watch.submitted(get_tensordict({"uid": ["v"], "raw_prompt": [[{"role": "user", "content": "Add."}]]}))
    tq.kv_batch_put(keys=["v", "w"], partition_id="val", tags=[{**prompt, "status": s} for s in ("pending", "failure")])
    buffer._wait_for_next_poll("val", 0.0)
    tq.kv_clear(partition_id="val", keys=["v", "w"])
    assert waits == [({"u3": "", "v": '"Add."'}, 2)]
    watch.begin_step()
    assert forgotten == [1]


def test_groups_that_dynamic_sampling_discards_are_remembered_with_their_lengths(queue, batch):
    """verl's own replay buffer filters: the rewards of u0 and u1 are all alike; of u2 and u3, which it could train on,
    it takes one."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_fuse.host.rollout.watch import RolloutObserver, RolloutWatch

    scored = [key for key in batch.keys if key.startswith(("u2_0", "u3_1"))]
    scores = [torch.ones(LENGTHS[batch.keys.index(key)]) for key in scored]
    tq.kv_batch_put(
        keys=scored, partition_id="train", fields=TensorDict({"rm_scores": nested(scores)}, batch_size=len(scored))
    )
    prompt = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_batch_put(keys=["u0", "u1", "u2", "u3"], partition_id="train", tags=[dict(prompt) for _ in range(4)])
    # A group without a trajectory: all of its samples failed.
    tq.kv_batch_put(keys=["u4"], partition_id="train", tags=[{**prompt, "status": "failure"}])
    empty = OmegaConf.create({})
    asked = []
    filtering = {"refill_fn": asked.append, "filter_groups_metric": "reward", "train_batch_size": 1}
    buffer = ReplayBuffer(
        "sync", empty, None, "drop", empty, gen_batch_size=1, sync_refill_failed_groups=True, **filtering
    )
    told = []

    class Told(RolloutObserver):
        def discard(self, keys):
            told.append(sorted(keys))

    watch = RolloutWatch(buffer, 0.01, 60.0)
    watch.observers.append(Told())
    trained, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    (taken,) = {TrajectoryKey.parse(key).uid for key in trained.keys}
    lengths = {"u0": [5, 2], "u1": [9, 3], "u2": [7, 4], "u3": [6, 1], "u4": []}
    assert taken in ("u2", "u3")
    assert watch.discarded == {uid: found for uid, found in lengths.items() if uid != taken}
    assert not asked, "there was enough to train on"
    # First what is filtered, then what was one too many; never what is trained on.
    surplus = "u2" if taken == "u3" else "u3"
    assert told == [["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"], [f"{surplus}_0_0", f"{surplus}_1_0"]]
    watch.begin_step()
    assert watch.discarded == {}


def test_values_of_workers_apart_are_streamed_beside_other_stages(stages, batch):
    """Values have a lane of their own, which is closed at first; all else goes through the lane of the others."""
    from verl_fuse.host.inference.apart import InferenceApart
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.inference.samples import SampleInference
    from verl_fuse.host.record.spans import Recorder

    spans, is_open = [], False
    recorder, multiples, info = Recorder(spans.append), {"ref": 2, "values": 2}, {"temperature": 1.0}
    fields = {"ref": ("ref_log_prob",), "values": ("values",)}
    with Lane("train", recorder, timeout=60.0) as train, Lane("critic", recorder, timeout=60.0) as critic:
        main = SampleInference(train, {"ref": stages["ref"]}, 2, multiples, fields, info)
        own = SampleInference(critic, {"values": stages["values"]}, 1, multiples, fields, info, beside=True)
        apart = InferenceApart(own, lambda: is_open, {1, 2})
        assert apart.views(()) == ()
        is_open = True
        (lane,) = apart.views(freed=(2,))
        assert (lane.name, lane.stages, lane.multiple, lane.released) == ("critic", ("values",), 2, False)
        assert [lane.released for lane in apart.views(freed=(0, 1, 2))] == [True]
        main.submit(batch.keys[:4], tags_of(batch))
        own.submit(batch.keys[2:6], tags_of(batch))
        own.finish()
        assert [sorted(rows) for rows in stages["values"].batches] == [batch.keys[2:6]]
        # What else is on the lane is not waited for.
        go_on = threading.Event()
        later = critic.submit(lambda: go_on.wait(30), "update")
        own.finish()
        assert not later.done()
        go_on.set()
        main.drain()
        for inference, stage in ((main, "ref"), (own, "values")):
            inference.complete(stage, batch, {}, lambda rows: {})
            assert set(stages[stage].computed) == set(batch.keys)
            assert max(stages[stage].computed.values()) == 1
            found, wanted = stored(batch, stages[stage].field)
            assert found == wanted
    groups = {span.args["micro_group"]: span.args["samples"] for span in spans if "micro_group" in span.args}
    assert groups == {0: 4, "critic 0": 0}, "a sample counts once"
