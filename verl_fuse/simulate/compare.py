"""Compares strategies side by side: the same lengths for all, several seeds, and intervals of the means.

Invariants (tests/unit/simulate/test_compare.py):
- all strategies see the same lengths in the same order;
- intervals hold the mean; with one seed there is none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from verl_fuse.cost.model import CostModel
from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import require_method
from verl_fuse.simulate.options import SIMULATED_STRATEGIES, SimulationOptions, features_of, of_plan
from verl_fuse.simulate.step import StepResult, simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.arrays import Floats
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.workload import Workload

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % bootstrap interval over seeds; `low == high == mean` with one seed."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class StrategyResult:
    """One strategy over all seeds; `speedup` and `cost_ratio` compare with stock, seed by seed."""

    strategy: str
    seconds: Estimate
    generation_and_inference: float
    training: float
    speedup: Estimate
    idle: float
    device_hours: float
    cost: Estimate
    cost_ratio: Estimate
    notes: tuple[str, ...]
    example: StepResult


def compare(
    workload: Workload,
    cost: CostModel,
    strategies: Sequence[str] | None = None,
    seeds: int = 8,
    plan: Plan | None = None,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
) -> list[StrategyResult]:
    """Return all rows of `simulate_each`."""
    return list(simulate_each(workload, cost, strategies, seeds, plan, options))


def simulate_each(
    workload: Workload,
    cost: CostModel,
    strategies: Sequence[str] | None = None,
    seeds: int = 8,
    plan: Plan | None = None,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
    report: Callable[[str], None] = lambda text: None,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[StrategyResult]:
    """Simulate one step per seed and strategy. `realloc` and `all` use `plan`, the others the stock placement; stock
    comes first.

    Without `strategies`: all of them, `realloc` only with a plan, strategies that draft only with an acceptance.
    `report` is told the simulation under way; `named` has other names for strategies.
    """
    if seeds < 1:
        raise FuseError(f"seeds={seeds}: needs a whole number >= 1")
    if plan is not None:
        plan.check(workload, cost.cluster)
    elif "realloc" in {part for name in strategies or () for part in name.split("+")}:
        raise FuseError("strategy='realloc' needs --plan: the placement that weights are moved to")
    known = {name: features_of(name, named) for name in (*SIMULATED_STRATEGIES, *named, *(strategies or ()))}
    drafting = {name for name, features in known.items() if "speculation" in features}
    if options.acceptance is None and (asked := drafting.intersection(strategies or ())):
        raise FuseError(
            f"strategy={', '.join(map(repr, sorted(asked)))} needs --set acceptance=SHARE, or --acceptance-of a run "
            "with fuse.speculation.enabled=true"
        )
    left_out = (drafting if options.acceptance is None else set()) | ({"realloc"} if plan is None else set())
    possible = [name for name in (*SIMULATED_STRATEGIES, *named) if name not in left_out]
    wanted = list(dict.fromkeys(["stock", *(strategies or possible)]))
    require_method(options.schedule)
    report("stock: looking for its fastest layouts")
    base = stock_plan(workload, cost, replace(options, acceptance=None))
    plans = {name: plan if plan and "realloc" in known[name] else base for name in wanted}

    def steps(name: str) -> list[StepResult]:
        found = []
        for seed in range(seeds):
            report(f"{name}: step {seed + 1} of {seeds}")
            rng, at = np.random.default_rng(seed), plans[name]
            strategy = "+".join(named.get(part, part) for part in name.split("+"))
            found.append(simulate_step(workload, at, cost, strategy, rng, of_plan(options, at)))
        return found

    stock = steps("stock")
    for name in wanted:
        yield _row(name, stock if name == "stock" else steps(name), stock)


def _row(name: str, results: list[StepResult], stock: list[StepResult]) -> StrategyResult:
    seconds, cost = (_values(results, field) for field in ("seconds", "device_seconds"))
    price = results[0].cost / results[0].device_seconds
    return StrategyResult(
        strategy=name,
        seconds=estimate(seconds),
        generation_and_inference=float(_values(results, "generation_and_inference").mean()),
        training=float(_values(results, "training").mean()),
        speedup=estimate(_values(stock, "seconds"), seconds),
        idle=float(_values(results, "idle").mean()),
        device_hours=float(cost.mean()) / 3600,
        cost=estimate(cost * price),
        cost_ratio=estimate(cost, _values(stock, "device_seconds")),
        notes=results[0].notes,
        example=results[0],
    )


def _values(results: Iterable[StepResult], field: str) -> Floats:
    return np.array([getattr(result, field) for result in results], dtype=np.float64)


def estimate(values: Floats, over: Floats | None = None) -> Estimate:
    """Return the mean of `values`, or the ratio of two sums, with a bootstrap interval over pairs."""
    below = np.ones_like(values) if over is None else over
    mean = float(values.sum() / below.sum())
    if len(values) == 1:
        return Estimate(mean, mean, mean)
    picks = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].sum(axis=1) / below[picks].sum(axis=1), [2.5, 97.5])
    return Estimate(mean, float(low), float(high))
