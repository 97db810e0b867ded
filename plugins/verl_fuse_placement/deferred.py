"""Hand the critic's update to its own workers, where the update runs beside the weight sync and the generation of the
next step.

Nothing before the values of the next step reads the critic's weights, so that every number is that of the same
placement one update after the other. The actor's update goes first: its ranks compute on the critic's devices too, and
generation waits for it alone.

Invariants (tests/integration/test_deferred_critic.py, test_deferred_run.py):
- an update begins once the actor is updated, or at once where it is not trained;
- calls on the critic's workers run in the order in which they are handed over: values of a step come after the
  update of the step before;
- the rows of an update stay in a partition of their own until it is done: the step that handed it
  over may clear its batch;
- `settle` returns when the update is done, and has logged its metrics under the number of the step that it is of;
- a failed update is raised at the next look at the rollout, or by `settle`;
- values of finished samples are computed while others generate, and not before the update is done.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_fuse.errors import FuseError
from verl_fuse.host import assembly
from verl_fuse.host.inference.apart import InferenceApart
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import SampleInference
from verl_fuse.host.inference.stages import READ_FIELDS, STAGE_FIELDS, micro_batch
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.host.record.step import StageMethod, StepStage, StockStage, TrainerPart
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.host.upstream.rows import read
from verl_fuse.spec.timeline import CRITIC_LANE, DEFER_CRITIC, UPDATE_CRITIC, WAIT_FOR_CRITIC

# The partition of TransferQueue with the rows of an update, until the update is done.
PARTITION = "verl_fuse_critic"
# verl's loss of the critic reads these fields beside the fields of a forward pass.
LEARNED_FIELDS = ("values", "returns")


@dataclass(frozen=True)
class Handed:
    """An update of one step that is not settled, with the metrics and seconds that it will have."""

    step: int
    done: "Future[tuple[dict[str, Any], float]]"


class DeferredCritic(TrainerPart):
    """Runs updates of the critic on `lane`, its workers' own. `fields` are what an update reads; `log` takes metrics
    and the step they are of. Before step `warm_up` the actor is not trained."""

    def __init__(
        self,
        lane: Lane,
        journal: Journal,
        fields: Sequence[str],
        log: Callable[[dict[str, Any], int], None],
        warm_up: int = 0,
    ) -> None:
        self.lane, self._warm_up = lane, warm_up
        self._journal, self._fields, self._log = journal, list(fields), log
        self._kept_back: Callable[[], None] | None = None
        self._handed: Handed | None = None
        self._seconds = self._waited = 0.0
        self.metrics: dict[str, float] = {}

    def after_inference(self, step: int) -> None:
        self._seconds = self._waited = 0.0
        self.metrics = {}

    def around(self, stage: StepStage, batch: KVBatchMeta, metrics: dict, stock: StockStage) -> KVBatchMeta:
        """Keep the critic's update back until the actor is updated; values of a step come after it."""
        step = self._journal.step.number
        if stage == "values":
            self.settle()
        instead = (lambda batch, _: self.update(step, batch, stock.method)) if stage == "update_critic" else None
        batch = stock(batch, metrics, instead)
        if stage == "update_actor" or (stage == "update_critic" and step < self._warm_up):
            self.begin()
        return batch

    def update(self, step: int, batch: KVBatchMeta, stock: StageMethod) -> KVBatchMeta:
        """Keep the rows of `batch` for `stock`, verl's update, which `begin` hands over."""
        with self._journal.stage(DEFER_CRITIC):
            self._kept_back = partial(self._hand_over, step, partial(_trained, self._kept(batch), stock))
        return batch

    def begin(self) -> None:
        """Hand over the update that was kept back; does not wait for it."""
        if self._kept_back is not None:
            self._kept_back()
            self._kept_back = None

    def _hand_over(self, step: int, work: Callable[[], tuple[dict[str, Any], float]]) -> None:
        recorded = partial(self.lane.recorded, UPDATE_CRITIC, "train", work, of_step=step)
        self._handed = Handed(step, self.lane.submit(recorded, f"{UPDATE_CRITIC} of step {step}"))

    @property
    def is_done(self) -> bool:
        """Tell whether the critic has the weights of the last step."""
        return self._kept_back is None and (self._handed is None or self._handed.done.done())

    def check(self) -> None:
        self.lane.check()

    def settle(self) -> None:
        self.begin()
        if self._handed is None:
            return
        handed, self._handed = self._handed, None
        watch = Stopwatch()
        with self._journal.stage(WAIT_FOR_CRITIC, of_step=handed.step):
            metrics, seconds = self.lane.wait(handed.done, f"{UPDATE_CRITIC} of step {handed.step}")
        self._seconds += seconds
        self._waited += watch.now - watch.start
        self.metrics = {
            "fuse/placement_update_seconds": self._seconds,
            "fuse/placement_wait_seconds": self._waited,
            "fuse/placement_hidden_seconds": max(0.0, self._seconds - self._waited),
        }
        self._log(metrics, handed.step)

    def close(self) -> None:
        self.lane.close()

    def _kept(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return the rows of `batch` with the fields of an update, in the partition of their own."""
        data = read(batch, self._fields)
        if missing := [name for name in self._fields if name not in data.keys()]:  # noqa: SIM118 - a TensorDict
            raise FuseError(
                f"the critic's update cannot be deferred: {', '.join(missing)} is missing from at least one of "
                f"{len(batch)} rows"
            )
        kept = tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=data, tags=batch.tags)
        kept.extra_info = dict(batch.extra_info or {})
        return kept


def _trained(kept: KVBatchMeta, stock: StageMethod) -> tuple[dict[str, Any], float]:
    """Run the update of these rows, clear them, and return its metrics and seconds."""
    watch, metrics = Stopwatch(), {}
    stock(kept, metrics)
    seconds = watch.now - watch.start
    tq.kv_clear(keys=kept.keys, partition_id=PARTITION)
    return metrics, seconds


def deferred_critic(host: Any, groups: Mapping[str, Any]) -> DeferredCritic:
    """Return the part that trains the critic of `host`, the trainer of mode `fuse`, beside the stages that follow, on a
    lane of its own; values are computed there too, once the workers hold the weights of the last step."""
    journal, fields, devices = host.journal, [*READ_FIELDS, *LEARNED_FIELDS], assembly.critic_devices(host)
    assert devices is not None, "a deferred critic has devices of its own"
    if host.processor is not None:
        fields.append("multi_modal_inputs")
    lane = Lane(CRITIC_LANE, journal.recorder, host.settings.core.call_timeout)
    deferred = DeferredCritic(
        lane,
        journal,
        fields,
        lambda metrics, step: host.logger.log(data=metrics, step=step),
        host.config.trainer.critic_warmup,
    )
    size = data_parallel_size(groups["critic"], "train")
    inference = SampleInference(
        lane=lane,
        calls={"values": partial(PPOTrainerSync._compute_values, host)},
        dp_size=size,
        multiples={"values": size * micro_batch(host.config, "values", host.ref_in_actor)},
        fields=STAGE_FIELDS,
        extra_info=assembly.extra_info(host),
        beside=bool(assembly.stages_of(host)),
    )
    each = host.replicas.devices_each
    host.director.apart = InferenceApart(inference, lambda: deferred.is_done, {device // each for device in devices})
    return deferred
