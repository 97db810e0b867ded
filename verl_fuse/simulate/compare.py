"""Compares strategies side by side: the same lengths for all, several seeds, and intervals of the means.

Invariants (tests/unit/simulate/test_compare.py):
- all strategies see the same lengths in the same order;
- intervals hold the mean; with one seed there is none.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import require_method
from verl_fuse.simulate.decided import SimulatedPolicy
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
    # Failures of a policy, at most one a step.
    faults: tuple[str, ...] = ()


def compare(
    workload: Workload,
    cost: AnalyticCost,
    strategies: Sequence[str] | None = None,
    seeds: int = 8,
    plan: Plan | None = None,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
) -> list[StrategyResult]:
    """Return all rows of a `Comparison`."""
    return list(Comparison(workload, cost, strategies, seeds, plan, options).rows())


class Comparison:
    """Strategies simulated on the same lengths, one step per seed, `realloc` with `plan`, the others with the stock
    placement.

    Without `strategies`: all but `without`, `realloc` only with a plan, strategies that draft only with an acceptance.
    `report` is told the simulation under way; `named` has other names for strategies. `policies` have a row each, by
    these names, after the strategies: they decide in steps of observe mode.
    """

    def __init__(
        self,
        workload: Workload,
        cost: AnalyticCost,
        strategies: Sequence[str] | None = None,
        seeds: int = 8,
        plan: Plan | None = None,
        options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
        report: Callable[[str], None] = lambda text: None,
        named: Mapping[str, str] = MappingProxyType({}),
        policies: Mapping[str, SimulatedPolicy] = MappingProxyType({}),
        without: Collection[str] = (),
    ) -> None:
        if plan is not None:
            plan.check(workload, cost.cluster)
        elif "realloc" in {part for name in strategies or () for part in name.split("+")}:
            raise FuseError("strategy='realloc' needs --plan: the placement that weights are moved to")
        known = {name: features_of(name, named) for name in (*SIMULATED_STRATEGIES, *named, *(strategies or ()))}
        drafting = {name for name, features in known.items() if "speculation" in features}
        if options.acceptance is None and (asked := drafting.intersection(strategies or ())):
            raise FuseError(
                f"strategy={', '.join(map(repr, sorted(asked)))} needs --set acceptance=SHARE, or --acceptance-of a "
                "run with fuse.speculation.enabled=true"
            )
        left_out = (drafting if options.acceptance is None else set()) | ({"realloc"} if plan is None else set())
        left_out |= {*without}
        possible = [name for name in (*SIMULATED_STRATEGIES, *named) if name not in left_out]
        require_method(options.schedule)
        self._strategies = list(dict.fromkeys(["stock", *(strategies or possible)]))
        self._workload, self._cost, self._seeds, self._plan = workload, cost, seeds, plan
        self._options, self._report, self._named, self._policies = options, report, named, policies

    def rows(self) -> Iterator[StrategyResult]:
        """Yield a row for each strategy, stock's first."""
        return map(self.row, [*self._strategies, *self._policies])

    def row(self, strategy: str) -> StrategyResult:
        """Simulate one strategy, or several with + between them, or a policy."""
        found = _row(strategy, self._stock if strategy == "stock" else self._steps(strategy), self._stock)
        policy = self._policies.get(strategy)
        return found if policy is None else replace(found, faults=tuple(policy.faults))

    @cached_property
    def _stock(self) -> list[StepResult]:
        return self._steps("stock")

    @cached_property
    def _stock_plan(self) -> Plan:
        self._report("stock: looking for its fastest layouts")
        return stock_plan(self._workload, self._cost, replace(self._options, acceptance=None))

    def _steps(self, name: str) -> list[StepResult]:
        policy, shown = self._policies.get(name), name
        if policy is not None:
            name = "observe"
        at = self._plan if self._plan and "realloc" in features_of(name, self._named) else self._stock_plan
        strategy = "+".join(self._named.get(part, part) for part in name.split("+"))
        options, found = of_plan(self._options, at), []
        for seed in range(self._seeds):
            self._report(f"{shown}: step {seed + 1} of {self._seeds}")
            rng = np.random.default_rng(seed)
            found.append(simulate_step(self._workload, at, self._cost, strategy, rng, options, policy))
        return found


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
