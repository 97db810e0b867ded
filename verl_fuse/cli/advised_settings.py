"""Finds verl's own settings for a recorded run, for `verl-fuse advise`: which of them may be faster, what each costs,
and what is known of its effect on this run.

Invariants (tests/unit/simulate/test_advise_command.py):
- seconds and bytes are told only where the cost model has them, for devices that are named;
- nothing is told of the effect on a run with features, whose stages are not verl's;
- of sizes that cut this run's samples alike the smallest is advised;
- beside an advised value every budget of tokens holds the longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import typer
from omegaconf import DictConfig

from verl_fuse.cli.prose import say
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.recorded import RecordedStep
from verl_fuse.errors import FuseError
from verl_fuse.simulate.recorded import Replay
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import getter, product
from verl_fuse.spec.model import Model
from verl_fuse.tune.candidates import Candidate, candidates, too_small
from verl_fuse.tune.order import BETTER, ORDER, UNKNOWN, WORSE, guesses, rank
from verl_fuse.tune.predicted import Effect, RecordedWork, effect, model_block
from verl_fuse.tune.setting import Value
from verl_fuse.tune.trial import Overrides, merged
from verl_fuse.tune.wanted import ALLOWED, columns

_EXPECTED = {BETTER: "faster", UNKNOWN: "unknown", WORSE: "slower"}


@dataclass(frozen=True)
class AdvisedSetting:
    """A setting with the overrides of the value to try first, what is expected of it, and its effect on the run (None:
    not known)."""

    candidate: Candidate
    overrides: Overrides
    expected: str
    effect: Effect | None

    @property
    def costs(self) -> tuple[str, ...]:
        return columns(self.candidate.setting.key)

    @property
    def reason(self) -> str:
        """Return why it may be faster, or else why it trains the same."""
        place = rank(self.candidate.setting.key)
        faster = self.expected == _EXPECTED[BETTER] and place < len(ORDER)
        return ORDER[place].reason if faster else self.candidate.setting.reason


def advised_settings(
    config: DictConfig, result: Replay, cost: AnalyticCost | None, on: Sequence[str]
) -> list[AdvisedSetting]:
    """Return the settings that the run, which had the features `on`, leaves to try, in the order of `verl-fuse tune`; a
    FuseError tells why the cost model does not fit the run."""
    get = getter(config)
    devices = product(get, "trainer", ("nnodes", "n_gpus_per_node"))
    if cost is not None and cost.cluster.devices != devices:
        has = f"has {cost.cluster.devices} devices, the run {written(devices)}"
        raise FuseError(f"--cluster {has}: name the run's; a cluster file has any number of nodes and devices")
    steps = [
        RecordedStep({}, tuple(step.prompt.tolist()), tuple(step.response.tolist()), tuple(step.replica.tolist()))
        for step in result.recorded
    ]
    run = RecordedWork(config, result.stages, steps, cache(partial(model_of, config)))
    found = [_advised(each, run, cost, predicts=not on) for each in candidates(config)]
    return sorted(found, key=lambda each: rank(each.candidate.setting.key))


def model_of(config: DictConfig, role: str) -> Model:
    """Return the model of a role; a FuseError names the key whose folder has none."""
    path = getter(config)(f"{model_block(role)}.path")
    try:
        model = Model.read(Path(str(path)).expanduser())
    except FuseError as error:
        raise FuseError(f"{model_block(role)}.path={written(path)}: predictions need the model: {error}") from error
    return model.as_value_model() if role == "critic" else model


def _advised(candidate: Candidate, run: RecordedWork, cost: AnalyticCost | None, *, predicts: bool) -> AdvisedSetting:
    def whole(value: Value) -> list[tuple[Candidate, Value]]:
        """Return the value with those of budgets that do not hold the longest sequence beside it."""
        with run.changed(candidate.changes(value)):
            budgets = [(each, least) for each in candidates(run.config) if (least := too_small(each))]
        return [(candidate, value), *budgets]

    def of(value: Value) -> Effect | None:
        changes = {key: new for each, one in whole(value) for key, new in each.changes(one).items()}
        return effect(run, changes, cost) if predicts else None

    (value, hope), *others = guesses(candidate)
    found = of(value)
    for other, hoped in others:
        if found is not None and hoped == hope == BETTER and of(other) == found:
            value = other
    expected = _EXPECTED[hope]
    if found is not None and found.seconds is not None and found.seconds <= 0:
        expected = _EXPECTED[WORSE] if found.seconds else "as before"
    overrides = reduce(merged, (each.overrides(one) for each, one in whole(value)))
    return AdvisedSetting(candidate, overrides, expected, found)


def as_data(found: Sequence[AdvisedSetting]) -> list[dict[str, Any]]:
    """Return the settings for JSON; of unknown effects the keys are null."""
    return [
        {
            "key": each.candidate.setting.key,
            "current": each.candidate.current,
            "overrides": each.overrides,
            "expected": each.expected,
            "reason": each.reason,
            **{column: column in each.costs for column in ("rounds", *ALLOWED)},
            "micro_batches": None if each.effect is None else [each.effect.before, each.effect.after],
            "seconds": None if each.effect is None else each.effect.seconds,
            "more_bytes": None if each.effect is None else each.effect.more_bytes,
        }
        for each in found
    ]


def show_settings(found: Sequence[AdvisedSetting], step_seconds: float, peak: int | None) -> None:
    """Print the settings that may be faster with lines to paste, and the names of the others."""
    faster = [each for each in found if each.expected == _EXPECTED[BETTER]]
    if faster:
        say("Settings of verl itself that train the same and may be faster:")
    for each in faster:
        typer.echo("  " + " ".join(each.overrides))
        costs = [f"costs: {', '.join(cost.replace('_', ' ') for cost in each.costs)}"] if each.costs else []
        effects = _effect(each.effect, step_seconds, peak)
        say(f"    {'; '.join([f'now {written(each.candidate.current)}', each.reason, *costs, *effects])}")
    if others := len(found) - len(faster):
        say(f"Other values of {others} more settings train the same, and are not expected to be faster (--json).")
    if faster:
        say("Try them: verl-fuse tune --keys KEY -- ARGUMENTS, with --allow for those that cost more than rounding.")


def _effect(found: Effect | None, step_seconds: float, peak: int | None) -> list[str]:
    if found is None:
        return ["not predicted"]
    told = []
    if found.before != found.after:
        told.append(f"{found.before:.3g} micro-batches of a rank in a step become {found.after:.3g}")
    if found.seconds is None:
        return [*told, "seconds not predicted"]
    told.append(f"{found.seconds:.2f} s a step less predicted ({found.seconds / step_seconds:.0%})")
    if found.more_bytes:
        there = "" if peak is None else f" beside the measured peak of {peak / 2**30:.1f}"
        told.append(f"at most {found.more_bytes / 2**30:.2g} GiB more predicted{there}")
    return told
