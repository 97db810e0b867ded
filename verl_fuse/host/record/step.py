"""A training step, and the parts of a trainer that a feature adds to it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any, Literal, Protocol

from transfer_queue import KVBatchMeta

from verl_fuse.host.record.accounting import StepAccount
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.spec.timeline import Category, Span


@dataclass
class Step:
    """The facts of one step: it trains on so many `prompts`, with `samples_each` samples of a prompt that does not ask
    for another number; `sources` maps a prompt uid to its data set; times in Unix seconds."""

    number: int
    prompts: int
    samples_each: int
    clock: Stopwatch = field(default_factory=Stopwatch)
    spans: list[Span] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    # Samples asked for, by prompt uid, in the order of submission.
    asked: dict[str, int] = field(default_factory=dict)
    first_asked: int = 0
    generation_start: float = 0.0
    end: float = 0.0
    account: StepAccount = field(init=False)
    # Tells of each row of the batch whether its advantages give the row a gradient.
    with_gradient: list[bool] = field(init=False)

    def ask(self, samples: Mapping[str, int]) -> None:
        """Ask for samples, by prompt uid: of the step's first prompts, or of more of them."""
        self.first_asked = self.first_asked or sum(samples.values())
        self.asked |= samples

    def samples_of(self, uid: str) -> int:
        """Return the number of samples asked for of a prompt."""
        return self.asked.get(uid, self.samples_each)

    def expected(self, discarded: Collection[str] = ()) -> int:
        """Return the number of samples that the rollout is to give. A `discarded` group (uid) counts until another is
        asked for in its place."""
        left = sum(self.asked.values()) - sum(self.asked.get(uid, 0) for uid in discarded)
        return max(self.first_asked, left) if self.asked else self.prompts * self.samples_each

    def expected_of(self, groups: Collection[str], discarded: Collection[str]) -> int:
        """Return the number of samples that a batch of the step is to have, of which `groups` (uids) have any: their
        own, and those of groups that left none."""
        others = (count for uid, count in self.asked.items() if uid not in groups and uid not in discarded)
        absent = max(0, self.prompts - len(groups))
        return sum(map(self.samples_of, groups)) + sum(islice(chain(others, repeat(self.samples_each)), absent))


class RunStage(Protocol):
    """A function that runs a stage of the step on the lane of the training workers, and records the stage with
    `args`."""

    def __call__(self, name: str, category: Category, work: Callable[[], Any], **args: float) -> Any: ...


# The stages of verl's step that a part may do something around.
StepStage = Literal["old_log_prob", "ref", "values", "advantage", "update_critic", "update_actor"]
# One of verl's stage methods: works on a batch, adds metrics, returns the batch.
StageMethod = Callable[[KVBatchMeta, dict], KVBatchMeta]


@dataclass(frozen=True)
class StockStage:
    """A stage of verl's step: `method` is verl's method by itself, `run` runs it on its workers' lane, and `parts` act
    around it, the last one outermost."""

    name: StepStage
    method: StageMethod
    run: StageMethod
    parts: Sequence["TrainerPart"] = ()

    def __call__(self, batch: KVBatchMeta, metrics: dict, instead: StageMethod | None = None) -> KVBatchMeta:
        """Run the stage, or other work `instead`, with what the parts do around it."""
        run = instead or self.run
        if not self.parts:
            return run(batch, metrics)
        *inner, part = self.parts
        return part.around(self.name, batch, metrics, replace(self, run=run, parts=inner))


class TrainerPart:
    """A feature's share in the trainer's steps. A feature that is off has no part."""

    # Metrics of the last step.
    metrics: Mapping[str, float] = {}

    def around(self, stage: StepStage, batch: KVBatchMeta, metrics: dict, stock: StockStage) -> KVBatchMeta:
        """Run a stage of verl's step, with what other parts do around it, or leave the stage out."""
        return stock(batch, metrics)

    def method(self, stage: StepStage, stock: StageMethod) -> StageMethod:
        """Return what does the work of a stage, whichever part runs it and when: verl's method `stock`, or a method
        that calls it."""
        return stock

    def discard(self, keys: Collection[str]) -> None:
        """Act before rows of these trajectories are cleared, before the batch of the step is there."""

    def after_inference(self, step: int) -> None:
        """Act once no lane will get another sample of `step`."""

    def before_weight_sync(self, step: int) -> None:
        """Act before the weights of `step` are given to the replicas, which sleep."""

    def with_weight_sync(self, step: int) -> None:
        """Act like `before_weight_sync`, but at the last moment, on the lane of the training workers."""

    def after_weight_sync(self, step: int) -> None:
        """Act once every replica of verl holds the weights of `step`; freed replicas take no requests yet."""

    def check(self) -> None:
        """Raise the failure of work beside the rollout; called at every look at the rollout."""

    def settle(self) -> None:
        """Finish work that still runs for an earlier stage before the driver goes on: the driver writes a checkpoint,
        validates, or ends the run."""

    def close(self) -> None:
        """Act at the end of the run."""
