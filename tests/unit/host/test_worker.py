"""Each rank of verl's workers records its calls on the track of its device. No Ray: a worker's recorder is a list."""

import asyncio
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from verl_fuse.host.record.spans import Recorder
    from verl_fuse.host.worker import recording_worker_class
from verl_fuse.spec.timeline import Span

OWN = Span("F0", "rank 6", "train", 1.0, 2.0)


class Critic:
    """verl's worker of a critic, as far as a step calls it."""

    def __init__(self, rank: int):
        self.rank = rank

    def infer_batch(self, data):
        return len(data)

    def train_mini_batch(self, data):
        raise RuntimeError("out of memory")

    def save_checkpoint(self, path):
        return path


class Actor(Critic):
    """The same of an actor."""

    compute_log_prob = compute_ref_log_prob = update_actor = Critic.infer_batch

    async def update_weights(self, global_steps):
        return global_steps


class Streaming(Actor):
    """An actor whose updates are streamed, or fused."""

    def stream_rows(self, data):
        return data

    def stream_finish(self, order):
        return order

    def fused_update(self, *shares):
        return shares, SimpleNamespace(spans=(OWN,))


def made(role: str, base: type, rank: int, first: int = 0):
    worker, spans = recording_worker_class(role, base, first)(rank), []
    worker._verl_fuse_recorder = Recorder(spans.append)
    return worker, spans


def test_the_ranks_of_a_critic_with_devices_of_its_own_have_their_numbers():
    worker, spans = made("critic", Critic, rank=2, first=4)
    assert worker.infer_batch({"a": 1, "b": 2}) == 2
    with pytest.raises(RuntimeError):
        worker.train_mini_batch([1])
    assert [(span.name, span.track, span.category) for span in spans] == [
        ("values", "rank 6", "inference"),
        ("update_critic", "rank 6", "train"),
    ]
    assert (spans[0].args, spans[1].args) == ({"samples": 2}, {"error": "RuntimeError"})


def test_calls_that_verl_awaits_are_recorded_until_they_end():
    worker, spans = made("actor", Actor, rank=1)
    assert asyncio.run(worker.update_weights(3)) == 3
    assert worker.save_checkpoint("here") == "here"
    assert [(span.name, span.track) for span in spans] == [("update_weights", "rank 1"), ("save_checkpoint", "rank 1")]
    assert not hasattr(worker, "stream_rows")


def test_streamed_calls_are_recorded_and_a_fused_update_hands_over_its_operations():
    worker, spans = made("actor", Streaming, rank=0)
    worker.stream_rows([1])
    worker.stream_finish("order")
    assert [span.name for span in spans] == ["stream_update", "update_actor"]
    assert worker.fused_update("critic", "actor")[0] == ("critic", "actor")
    assert spans[2:] == [OWN]


@pytest.mark.parametrize(("role", "exports"), [("actor", True), ("critic", False)])
def test_the_actor_alone_leaves_its_whole_weights(role, exports):
    found = recording_worker_class(role, Actor if role == "actor" else Critic)
    assert hasattr(found, "export_whole") is exports
    assert hasattr(found, "export_weights")
    assert hasattr(found, "report_memory")
