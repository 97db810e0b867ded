"""The hand-over of a critic's update on a real TransferQueue; only the workers are missing. Shows the invariants of
plugins/verl_fuse_placement/deferred.py."""

import threading

import pytest

ray = pytest.importorskip("ray")
tq = pytest.importorskip("transfer_queue")

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402

from verl_fuse.errors import FuseError  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

LENGTHS = [3, 1, 4]
FIELDS = ("responses", "values", "returns")


@pytest.fixture(scope="module")
def queue():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def batch(queue):
    """Three rows as a step leaves them after its advantages."""
    keys = [f"u{i}_0_0" for i in range(len(LENGTHS))]

    def column(scale: float):
        rows = [torch.arange(n) * scale + 10 * i for i, n in enumerate(LENGTHS)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    fields = {name: column(scale) for name, scale in zip((*FIELDS, "advantages"), (1.0, 0.5, 0.25, 2.0), strict=True)}
    tags = [{"response_len": n, "seq_len": n} for n in LENGTHS]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=len(keys)), tags=tags)
    yield KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 0.7})
    if left := list((tq.kv_list("train") or {}).get("train", {})):
        tq.kv_clear(keys=left, partition_id="train")


class Critic:
    """verl's update, which waits for `go`, and reports the values it read."""

    def __init__(self):
        self.go, self.begun, self.seen, self.error = threading.Event(), threading.Event(), [], None

    def __call__(self, batch, metrics):
        self.begun.set()
        assert self.go.wait(60)
        if self.error:
            raise self.error
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        self.seen.append((batch, {name: [row.tolist() for row in data[name].unbind()] for name in data.keys()}))  # noqa: SIM118
        metrics["critic/vf_loss"] = float(len(self.seen))
        return batch


@pytest.fixture
def critic():
    return Critic()


@pytest.fixture
def logged():
    return []


@pytest.fixture
def deferred(logged):
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.record.journal import Journal
    from verl_fuse_placement.deferred import DeferredCritic

    class Hook:
        def fuse_event(self, event):
            """Nobody listens."""

    journal = Journal(Hook(), collector=None)
    journal.begin_step(3, prompts=3, samples_each=1)
    lane = Lane("critic", journal.recorder, 60.0)
    made = DeferredCritic(lane, journal, FIELDS, lambda metrics, step: logged.append((step, metrics)))
    yield made
    made.close()


def kept() -> dict:
    from verl_fuse_placement.deferred import PARTITION

    return (tq.kv_list(PARTITION) or {}).get(PARTITION, {})


def test_an_update_is_kept_back_until_it_may_begin_and_outlives_the_rows_of_its_step(deferred, critic, batch, logged):
    wanted = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=list(FIELDS))
    wanted = {name: [row.tolist() for row in wanted[name].unbind()] for name in FIELDS}
    assert deferred.update(3, batch, critic) is batch
    assert not critic.begun.wait(0.2), "the actor goes first"
    assert not deferred.is_done
    deferred.begin()
    assert critic.begun.wait(60)
    assert not deferred.is_done
    tq.kv_clear(keys=batch.keys, partition_id="train")
    assert sorted(kept()) == sorted(batch.keys)
    assert (logged, deferred.metrics) == ([], {})
    critic.go.set()
    deferred.settle()
    assert deferred.is_done
    ((read, seen),) = critic.seen
    assert seen == wanted, "what an update reads, and nothing else"
    assert (read.keys, read.tags, read.extra_info) == (batch.keys, batch.tags, {"temperature": 0.7})
    assert read.extra_info is not batch.extra_info
    assert logged == [(3, {"critic/vf_loss": 1.0})]
    assert kept() == {}
    assert deferred.metrics["fuse/placement_update_seconds"] >= deferred.metrics["fuse/placement_hidden_seconds"] >= 0
    deferred.settle()
    assert len(logged) == 1, "once"
    deferred.after_inference(4)
    assert deferred.metrics == {}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("warm_up", "begins"), [(3, "update_actor"), (4, "update_critic")])
def test_the_actor_goes_first_unless_it_is_not_trained_yet(deferred, critic, batch, warm_up, begins, order):
    from verl_fuse.host.record.step import StockStage, TrainerPart

    deferred._warm_up, done = warm_up, []

    class Lean(TrainerPart):
        def around(self, stage, batch, metrics, stock):
            return stock(batch, metrics, run if stage == "update_actor" else None)

    def run(batch, metrics):
        done.append(critic.begun.is_set())
        return batch

    def step(stage):
        return StockStage(stage, critic, run, [Lean(), deferred][::order])(batch, {})

    assert step("values") is batch
    assert step("update_critic") is batch
    assert critic.begun.wait(60 if begins == "update_critic" else 0.2) is (begins == "update_critic")
    assert step("update_actor") is batch
    assert critic.begun.wait(60)
    assert done == [False, begins == "update_critic"], "verl's own stage, but for the critic's"
    critic.go.set()
    assert step("values") is batch
    assert len(critic.seen) == 1, "values come after the update"


def test_settling_runs_an_update_that_was_kept_back(deferred, critic, batch, logged):
    critic.go.set()
    deferred.update(3, batch, critic)
    deferred.settle()
    assert [step for step, _ in logged] == [3]


def test_what_the_critic_computes_next_comes_after_its_update(deferred, critic, batch):
    assert deferred.is_done, "nothing is handed over"
    deferred.update(3, batch, critic)
    deferred.begin()
    values = deferred.lane.submit(lambda: len(critic.seen), "values")
    assert not values.done()
    critic.go.set()
    assert deferred.lane.wait(values, "values") == 1


def test_a_failure_is_raised_at_the_next_look_and_when_it_is_waited_for(deferred, critic, batch, logged):
    critic.error = RuntimeError("the device fell off the bus")
    deferred.update(3, batch, critic)
    deferred.begin()
    deferred.check()
    critic.go.set()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        deferred.settle()
    with pytest.raises(FuseError, match="lane 'critic': a call on its workers failed: the device fell off the bus"):
        deferred.check()
    assert logged == []
    tq.kv_clear(keys=list(kept()), partition_id="verl_fuse_critic")


def test_a_field_that_is_missing_is_named(deferred, critic, batch):
    responses = torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)
    fields = TensorDict({"responses": responses}, batch_size=1)
    tq.kv_batch_put(keys=["odd"], partition_id="train", fields=fields, tags=[{}])
    rows = KVBatchMeta(keys=[*batch.keys, "odd"], tags=[*batch.tags, {}], partition_id="train")
    with pytest.raises(FuseError, match=r"values, returns is missing from at least one of 4 rows"):
        deferred.update(3, rows, critic)
