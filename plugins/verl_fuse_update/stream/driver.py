"""Does the driver's part of a streamed update: finds complete groups, accounts for streamed rows, and checks at the end
whether they still hold.

Advantages of a group are verl's, computed for the group alone. Once the batch is whole verl computes them again, and
the guard compares.

Invariants (tests/integration/test_stream_driver.py, tests/integration/test_stream_run.py):
- a group is streamed once, whole, and only when every sample of it is finished and has gone through all streamed
  stages;
- every row of the batch is in one call: of a streamed group, or of the rest;
- on any difference, or failure, all ranks drop their gradients and the step's update is the one without streaming;
- a step that does not train the actor, or that runs a pass for old log-probs, keeps no gradient.
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from verl_fuse.host.inference.stages import READ_FIELDS
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.host.record.step import RunStage, StageMethod
from verl_fuse.host.rollout.watch import RolloutWatch
from verl_fuse.host.upstream.advantages import ADVANTAGE_FIELDS
from verl_fuse.host.upstream.rows import read, rows, tags_of
from verl_fuse.spec.step import LaneView, Sample
from verl_fuse.spec.timeline import GENERATION
from verl_fuse.spec.trajectory import TrajectoryKey
from verl_fuse_update.lean.driver import LeanUpdates
from verl_fuse_update.lean.options import LEAN, LeanOptions
from verl_fuse_update.stream.guard import StreamedRow, difference, streamed_rows
from verl_fuse_update.stream.lanes import StreamLanes, answers_together, dealt, on_ranks
from verl_fuse_update.stream.options import ORDER, STREAM_FIELDS, StreamOrder

logger = logging.getLogger(__name__)

UPDATE = "update"


@dataclass
class _Streamed:
    """The state of one step: `rows` whose gradients wait, `tokens` of them; groups `handed` to a lane, and when each
    was first `seen` complete, by its tokens."""

    handed: set[str] = field(default_factory=set)
    rows: dict[str, StreamedRow] = field(default_factory=dict)
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    nominal: float = 1.0
    seen: dict[str, tuple[float, int]] = field(default_factory=dict)
    evicted: str = ""


class StreamedUpdates(LeanUpdates):
    """The updates of `trainer`, on shard groups of `devices_each` ranks. `advantages` are verl's, of a batch;
    `deferred`: the loss is a mean over tokens."""

    def __init__(
        self,
        trainer: Any,
        run: RunStage,
        options: LeanOptions,
        lanes: StreamLanes,
        devices_each: int,
        advantages: StageMethod,
        deferred: bool,
    ) -> None:
        super().__init__(trainer, run, options)
        self.lanes, self._size, self._advantages, self._deferred = lanes, devices_each, advantages, deferred
        rollout, data = trainer.config.actor_rollout_ref.rollout, trainer.config.data
        # This upper bound holds until a step has counted its tokens.
        self._tokens = float(data.train_batch_size * rollout.n * rollout.response_length)
        self._now, self._step, self._going = _Streamed(), -1, False
        self._said: dict[str, float] = {}
        self._more_fields = [
            *(["ref_log_prob"] if trainer.config.actor_rollout_ref.actor.use_kl_loss else []),
            *(["multi_modal_inputs"] if trainer.processor is not None else []),
        ]
        self._fallbacks = 0
        # Advantages are computed on the lanes' threads, and their configuration is changed meanwhile.
        self._lock = threading.Lock()

    # -- while others generate

    def views(self, released: Collection[int]) -> tuple[LaneView, ...]:
        """Return the shard groups on devices of released replicas, where this step trains the actor."""
        trainer = self._trainer
        if trainer.config.trainer.critic_warmup > trainer.global_steps:
            return ()
        return tuple(
            LaneView(f"{UPDATE} {number}", (), self.lanes.queued(number), 1, released=True)
            for number in self.lanes
            if number in released
        )

    def complete(self, watch: RolloutWatch) -> tuple[Sample, ...]:
        """Return samples of complete groups that no lane has, group after group, the groups that were complete first in
        front."""
        self._begin()
        step, stages, found = self._trainer.journal.step, self._trainer.inference, []
        for uid, samples in watch.complete(step.samples_of).items():
            if uid not in self._now.handed and stages.has_computed([sample.key for sample in samples]):
                self._now.seen.setdefault(uid, (step.clock.now, sum(sample.seq_len for sample in samples)))
                found += samples
        return tuple(found)

    def stream(self, keys: Sequence[str], tags: Mapping[str, dict], lane: str) -> None:
        """Hand whole groups to a lane; does not wait."""
        number, now = int(lane.removeprefix(f"{UPDATE} ")), self._now
        now.handed |= {TrajectoryKey.parse(key).uid for key in keys}
        mine = {key: dict(tags[key]) for key in keys}
        what = f"streamed update {now.calls} of step {self._trainer.global_steps} ({len(keys)} samples)"
        now.calls += 1
        self.lanes.submit(number, partial(self._stream, now, number, mine), what)

    def discard(self, keys: Collection[str]) -> None:
        """Act before rows of these trajectories are cleared."""
        groups = {TrajectoryKey.parse(key).uid for key in keys} & self._now.handed
        if groups:
            self.lanes.drain()
            self._now.evicted = f"group {min(groups)} was discarded after it was streamed"

    def after_inference(self, step: int) -> None:
        self.lanes.drain()
        self.check()

    def check(self) -> None:
        self._begin()
        if self.lanes.stranded is not None:
            raise self.lanes.stranded

    def close(self) -> None:
        self.lanes.close()

    def _begin(self) -> None:
        if self._step != self._trainer.global_steps:
            self._step, self.lanes.failure = self._trainer.global_steps, ""
            self._now = _Streamed(nominal=self._tokens)

    def _stream(self, now: _Streamed, number: int, tags: Mapping[str, dict]) -> None:
        """Compute, on a lane, the advantages of these groups, then their gradients on the ranks of the shard group."""
        watch, keys = Stopwatch(), list(tags)
        with self._lock, self._without_correction():
            self._advantages(rows(keys, tags, {}), {})
        advantages = streamed_rows(keys, read(rows(keys, tags, {}), ADVANTAGE_FIELDS))
        ranks = range(number * self._size, (number + 1) * self._size)
        answers_together(self._call(ranks, tags, {key: int(tags[key]["seq_len"]) for key in keys}, last=False), ranks)
        seconds = watch.now - watch.start
        with self._lock:
            now.rows |= advantages
            now.tokens += sum(int(tag["seq_len"]) for tag in tags.values())
            now.seconds += seconds
            now.longest = max(now.longest, seconds)

    def _call(self, ranks: range, tags: Mapping[str, dict], work: Mapping[str, int], last: bool) -> list[Any]:
        """Deal rows out to `ranks`, by `work` in tokens."""
        config = self._trainer.config.actor_rollout_ref
        info = {
            "calculate_entropy": bool(config.actor.calculate_entropy or config.actor.entropy_coeff != 0.0),
            "distillation_use_topk": False,
            "distillation_only": False,
            "global_batch_size": self._mini_batch,
            "temperature": config.rollout.temperature,
            LEAN: self._options,
        }
        spare = min(tags, key=lambda key: int(tags[key]["seq_len"]))
        calls = []
        for rank, mine in zip(ranks, dealt(work, len(ranks)), strict=True):
            batch = rows(mine or [spare], tags, {**info, ORDER: replace(self._order(last), counts=bool(mine))})
            batch.fields = [*READ_FIELDS, *STREAM_FIELDS, *self._more_fields]
            calls.append((rank, "stream_rows", (batch,)))
        return on_ranks(self._trainer.actor_rollout_wg, calls)

    def _order(self, last: bool) -> StreamOrder:
        return StreamOrder(self._step, self._now.nominal, self._deferred, last=last)

    # -- once the batch is whole

    def advantage(self, batch: KVBatchMeta, metrics: dict, stock: StageMethod) -> KVBatchMeta:
        """Run verl's advantages of the batch, and compare the advantages of streamed groups with them."""
        self._begin()
        batch = super().advantage(batch, metrics, stock)
        found = streamed_rows(batch.keys, read(batch, ADVANTAGE_FIELDS))
        # The next step divides by this number of tokens until it has counted its own; none would make its losses no
        # numbers.
        self._tokens = float(sum(row.mask.sum() for row in found.values())) or self._tokens
        reason = self._why_not(batch, found)
        self._going = bool(self._now.rows) and reason is None
        if reason is not None:
            self._fallbacks += 1
            logger.warning("step %d drops what it streamed: %s", self._trainer.global_steps, reason)
            group = self._trainer.actor_rollout_wg
            self._trainer.lane.call(
                "stream_drop",
                "other",
                lambda: ray.get(on_ranks(group, [(rank, "stream_drop", ()) for rank in range(group.world_size)])),
            )
        self._said = self._account(batch)
        return batch

    def actor(self, batch: KVBatchMeta, metrics: dict, actor: StageMethod) -> KVBatchMeta:
        """Update the actor with the streamed gradients and the rest."""
        self.seconds_before = self._now.seconds if self._going else 0.0
        batch = super().actor(batch, metrics, actor)
        self.metrics |= self._said
        return batch

    def train(self, batch: KVBatchMeta, kept: list[bool], metrics: dict, actor: StageMethod) -> None:
        """Train the rest of the rows and make the optimizer step, or train all rows where nothing was streamed."""
        if not self._going:
            super().train(batch, kept, metrics, actor)
            return
        self._going = False
        tags, group = tags_of(batch), self._trainer.actor_rollout_wg
        computed = dict(zip(batch.keys, kept, strict=True))
        rest = {
            key: int(tag["seq_len"]) if computed[key] else 1 for key, tag in tags.items() if key not in self._now.rows
        }
        ranks = range(group.world_size)
        # Nothing is in flight on any rank.
        ray.get(self._call(ranks, tags, rest, last=True))
        order = self._order(last=True)
        output = ray.get(on_ranks(group, [(rank, "stream_finish", (order,)) for rank in ranks]))[0]
        output.pop("tokens")
        output = rename_dict(output, "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics.update(reduce_metrics(output))

    def _why_pass(self, batch: KVBatchMeta) -> str | None:
        if len(batch) != self._mini_batch:
            return f"{len(batch)} rows are not one mini-batch of {self._mini_batch}"
        return super()._why_pass(batch)

    def _why_not(self, batch: KVBatchMeta, found: Mapping[str, StreamedRow]) -> str | None:
        """Return the reason why gradients that wait are of no use, or None."""
        if not self._now.handed:
            return None
        if reason := self.lanes.failure or self._now.evicted:
            return reason
        if not self._own:
            return "it runs a pass for old log-probs"
        tags = tags_of(batch)
        return difference(self._now.rows, {key: row for key, row in found.items() if not tags[key].get("is_padding")})

    def _account(self, batch: KVBatchMeta) -> dict[str, float]:
        """Return the streamed shares of the batch, and of the groups that were complete a call before generation
        ended."""
        now, step = self._now, self._trainer.journal.step
        ends = [span.end for span in step.spans if span.name == GENERATION]
        # A call could have trained on these groups before generation ended.
        due = {uid: tokens for uid, (seen, tokens) in now.seen.items() if ends and seen <= ends[-1] - now.longest}
        streamed = {TrajectoryKey.parse(key).uid for key in now.rows}
        whole = sum(int(tag["seq_len"]) for tag in batch.tags)
        return {
            "fuse/stream_tokens": now.tokens / max(whole, 1),
            "fuse/stream_complete_tokens": sum(due.values()) / max(whole, 1),
            "fuse/stream_missed_tokens": sum(due[uid] for uid in due.keys() - streamed) / max(whole, 1),
            "fuse/stream_calls": float(now.calls),
            "fuse/stream_seconds": now.seconds,
            "fuse/stream_fallbacks": float(self._fallbacks),
        }
