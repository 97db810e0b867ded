"""A training step, and the parts of a trainer that a feature adds to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_fuse.host.record.accounting import StepAccount
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.spec.timeline import Category, Span


@dataclass
class Step:
    """The facts of one step: it trains on `samples_each` of so many `prompts`; `sources` by prompt uid the data
    set; times in Unix seconds."""

    number: int
    prompts: int
    samples_each: int
    clock: Stopwatch = field(default_factory=Stopwatch)
    spans: list[Span] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    generation_start: float = 0.0
    end: float = 0.0
    account: StepAccount = field(init=False)
    # Of each row of the batch, whether it has a gradient by its advantages.
    with_gradient: list[bool] = field(init=False)

    @property
    def expected(self) -> int:
        """Samples that the step trains on."""
        return self.prompts * self.samples_each


class RunStage(Protocol):
    """Runs a stage of the step on the lane of the training workers, and records it with `args`."""

    def __call__(self, name: str, category: Category, work: Callable[[], Any], **args: float) -> Any: ...


class TrainerPart:
    """A feature's share in the trainer's steps. A feature that is off has no part."""

    # Metrics of the last step.
    metrics: Mapping[str, float] = {}

    def after_inference(self, step: int) -> None:
        """No lane will be given a sample of `step` any more."""

    def before_weight_sync(self, step: int) -> None:
        """The weights of `step` are about to be given to the replicas, which sleep."""

    def with_weight_sync(self, step: int) -> None:
        """Called as `before_weight_sync` is, at the last moment, on the lane of the training workers."""

    def after_weight_sync(self, step: int) -> None:
        """Every replica of verl holds the weights of `step`; those that were freed take no requests yet."""

    def check(self) -> None:
        """The rollout is looked at: raise the failure of what runs beside it."""

    def settle(self) -> None:
        """Work that still runs for an earlier stage must be done before the driver goes on: it computes values, writes
        a checkpoint, validates, or ends the run."""

    def close(self) -> None:
        """The run is over."""
