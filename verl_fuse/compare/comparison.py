"""Compares a run with its baseline.

Invariants (tests/unit/compare/test_comparison.py):
- only steps that both runs have are compared: step N of both trains on the same prompts, after as many updates;
- the first `warm_up` steps of each run are left out of all times, whatever their numbers;
- a run compared with itself shows no difference anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl_fuse.compare.intervals import Interval, difference, mean, ratio
from verl_fuse.compare.run import OTHER, STEP_METRIC, TIMING, RunMetrics
from verl_fuse.errors import FuseError

# Metrics drawn over each other: their label, and verl's names, of which the first that both runs logged counts.
CURVES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "KL to the reference": ("actor/reward_kl_penalty", "actor/kl_loss"),
    "KL to the old policy": ("actor/ppo_kl",),
    "response tokens": ("response_length/mean",),
}
# The verdict judges this curve.
REWARD_CURVE = "reward"


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs: steps with a time, seconds per compared step, the tokens and samples trained on, how often
    verl-fuse fell back to stock behaviour (None: not logged), and by step the seconds of all timed steps up to it."""

    name: str
    stock: bool
    steps: int
    seconds: Interval
    tokens: float | None
    samples: float | None
    samples_missing: float | None
    fallbacks: float | None
    elapsed: dict[int, float]


@dataclass(frozen=True)
class StageDifference:
    """Mean seconds of a stage in the compared steps, and the second run's excess over the first run's."""

    name: str
    base: float
    fused: float
    difference: Interval


@dataclass(frozen=True)
class Curve:
    """A metric of both runs by step, and the second run's excess in the steps that both have."""

    name: str
    metric: str
    base: dict[int, float]
    fused: dict[int, float]
    difference: Interval


@dataclass(frozen=True)
class Comparison:
    """`ratio` is the second run's seconds per step over the baseline's; `steps` are the steps whose times are compared;
    `stages` add up to `whole`."""

    base: ComparedRun
    fused: ComparedRun
    warm_up: int
    steps: tuple[int, ...]
    ratio: Interval
    stages: tuple[StageDifference, ...]
    whole: StageDifference
    curves: tuple[Curve, ...]

    @property
    def speedup(self) -> Interval:
        """Return the factor by which the second run's steps are faster."""
        return self.ratio.inverse


def compare(base: RunMetrics, fused: RunMetrics, warm_up: int = 1) -> Comparison:
    """Return all differences of two runs; a FuseError if they have no step in common after warm-up."""
    steps = common_steps(base, fused, warm_up)
    seconds = [[run.seconds(step) for step in steps] for run in (base, fused)]
    return Comparison(
        base=_side(base, steps),
        fused=_side(fused, steps),
        warm_up=warm_up,
        steps=tuple(steps),
        ratio=ratio(*seconds),
        stages=tuple(_stages(base, fused, steps)),
        whole=_stage(STEP_METRIC.removeprefix(TIMING), *seconds),
        curves=tuple(_curves(base, fused)),
    )


def common_steps(base: RunMetrics, fused: RunMetrics, warm_up: int) -> list[int]:
    """Return the steps whose times are compared."""
    for run in (base, fused):
        if len(run.timed) <= warm_up:
            raise FuseError(
                f"{run.name}: steps with a time (timing_s/step): {len(run.timed)}; needs more than the {warm_up} that "
                "--warm-up leaves out"
            )
    left = [run.timed[warm_up:] for run in (base, fused)]
    found = sorted(set(left[0]) & set(left[1]))
    if not found:
        (first, last), (begin, end) = ((steps[0], steps[-1]) for steps in left)
        raise FuseError(
            f"{base.name} has the steps {first} to {last} and {fused.name} {begin} to {end} (after warm-up): needs "
            "steps of the same number, which "
            "train on the same prompts"
        )
    return found


def _side(run: RunMetrics, steps: Sequence[int]) -> ComparedRun:
    return ComparedRun(
        name=run.name,
        stock=run.stock,
        steps=len(run.timed),
        seconds=mean([run.seconds(step) for step in steps]),
        tokens=run.total("perf/total_num_tokens"),
        samples=run.samples(),
        samples_missing=run.total("fuse/samples_missing"),
        fallbacks=run.counted("fuse/fallbacks"),
        elapsed=run.elapsed(),
    )


def _stages(base: RunMetrics, fused: RunMetrics, steps: Sequence[int]) -> Iterator[StageDifference]:
    """Yield the stages in the order of the baseline, then all others; a stage that a step does not have took 0 s of the
    step."""
    rows = [[run.stages(step) for step in steps] for run in (base, fused)]
    names = dict.fromkeys(name for side in rows for row in side for name in row if name != OTHER)
    for name in (*names, OTHER):
        one, other = ([row.get(name, 0.0) for row in side] for side in rows)
        yield _stage(name, one, other)


def _stage(name: str, base: Sequence[float], fused: Sequence[float]) -> StageDifference:
    return StageDifference(name, mean(base).value, mean(fused).value, difference(base, fused))


def _curves(base: RunMetrics, fused: RunMetrics) -> Iterator[Curve]:
    for name, metrics in CURVES.items():
        yield from (_curve(base, fused, name, metric) for metric in _common(base, fused, metrics)[:1])
    for metric in _common(base, fused, base.validations):
        yield _curve(base, fused, metric.partition("/")[2], metric)


def _common(base: RunMetrics, fused: RunMetrics, metrics: Sequence[str]) -> list[str]:
    """Return the metrics that both runs logged of one step at least."""
    return [metric for metric in metrics if base.metric(metric).keys() & fused.metric(metric).keys()]


def _curve(base: RunMetrics, fused: RunMetrics, name: str, metric: str) -> Curve:
    one, other = base.metric(metric), fused.metric(metric)
    both = sorted(one.keys() & other.keys())
    return Curve(name, metric, one, other, difference([one[s] for s in both], [other[s] for s in both]))
