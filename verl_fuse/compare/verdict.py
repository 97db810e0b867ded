"""Tells the result of a comparison in one sentence and a few notes.

Invariants (tests/unit/compare/test_verdict.py):
- a difference is claimed only where the 95 % interval excludes "none"; without an interval no difference is claimed;
- the verdict on two equal runs is that they differ in nothing.
"""

import math
from collections.abc import Callable, Iterator

from verl_fuse.compare.comparison import REWARD_CURVE, ComparedRun, Comparison
from verl_fuse.compare.intervals import Interval
from verl_fuse.spec.step import VERL_POLL_INTERVAL
from verl_fuse.spec.timeline import GENERATION

# A wider interval (half its width, as a share of the step) gets a note with the number of steps that would narrow it.
WIDE_INTERVAL = 0.05
# Stock verl notices the end of a rollout so late at most; where this is a smaller share of the step there is no note.
LITTLE_LATE = 0.02


def verdict(found: Comparison) -> str:
    """Return one sentence on step time and rewards."""
    value, _, bounds = interval_text(found.speedup).partition(" ")
    baseline = "stock's" if found.base.stock else "the baseline's"
    taken = f"fused steps are {value} times as fast as {baseline} {bounds}".rstrip()
    if found.ratio.low is None:
        return f"one step says nothing of noise: {taken} in step {found.steps[0]}, the only one that can be compared"
    rewards = next((curve for curve in found.curves if curve.name == REWARD_CURVE), None)
    difference = None if rewards is None or rewards.difference.low is None else rewards.difference
    if difference is not None and found.ratio.holds(1.0) and difference.holds(0.0):
        return f"nothing differs beyond noise: {taken}; rewards within noise"
    time = f"{taken}, within noise" if found.ratio.holds(1.0) else f"{taken}, slower" if found.ratio.low > 1 else taken
    if difference is None:
        return f"{time}; no rewards to compare"
    if difference.holds(0.0):
        return f"{time}; rewards within noise"
    return f"{time}; rewards differ by {difference_text(difference)}"


def at_least(found: Comparison, wanted: float) -> tuple[bool, str]:
    """Tell whether steps are shown to be `wanted` times as fast as the baseline's; return also the sentence that names
    the bound."""
    low, bound = found.speedup.low, "the lower end of the 95 % interval of the speed-up"
    if low is None:
        return False, f"--at-least {wanted:g}: not met: {bound} counts, and one step gives no interval"
    passed = low >= wanted
    return passed, f"--at-least {wanted:g}: {'met' if passed else 'not met'}: {bound} is {low:.3f}"


def notes(found: Comparison, polling: Interval | None = None) -> Iterator[str]:
    """Return notes that a reader needs before the verdict is believed; `polling` is stock's seconds beyond
    those of observe mode, if they were measured: the part of a gain over stock that observe mode has alone."""
    base, fused = found.base, found.fused
    generation = sum(stage.base for stage in found.stages if stage.name == GENERATION)
    if fused.stock:
        yield f"{fused.name} logged no metric of verl-fuse: it is a run of stock verl."
    if not base.stock:
        yield f"{base.name} is a run with verl-fuse itself."
    elif polling is not None:
        yield (
            f"Compared with stock verl a step changes by {difference_text(found.whole.difference)} s. Observe mode "
            f"alone changes it by {difference_text(-polling)} s: it looks at the rollout more often than verl's every "
            f"{VERL_POLL_INTERVAL:g} s, and builds agent loops without Hydra."
        )
    elif not fused.stock and generation >= VERL_POLL_INTERVAL >= LITTLE_LATE * base.seconds.value:
        yield (
            f"verl looks at its rollout every {VERL_POLL_INTERVAL:g} s, verl-fuse by default more often: a stock "
            f"step may end up to {VERL_POLL_INTERVAL:g} s late, at most {VERL_POLL_INTERVAL / base.seconds.value:.0%} "
            "of these steps. A baseline in observe mode leaves this out (`ab --baseline both` measures it)."
        )
    if len({base.steps, fused.steps, len(found.steps) + found.warm_up}) > 1:
        yield (
            f"{base.name} has {base.steps} timed steps and {fused.name} {fused.steps}: times of the {len(found.steps)} "
            "that both have are compared."
        )
    if fused.fallbacks:
        yield f"verl-fuse fell back to stock behaviour {fused.fallbacks:g} times: see the run's log."
    if fused.samples_missing:
        yield f"{fused.samples_missing:g} samples were asked for and not trained on in {fused.name}."
    if (high := found.ratio.high) is not None and found.ratio.holds(1.0):
        half = math.log(high / found.ratio.value)
        if half > WIDE_INTERVAL:
            needed = math.ceil(len(found.steps) * (half / WIDE_INTERVAL) ** 2)
            yield (
                f"A difference below {math.expm1(half):.0%} would not be seen; about {needed} steps would show one "
                f"of {WIDE_INTERVAL:.0%}."
            )


def compared(found: Comparison) -> str:
    """Name the steps whose times are compared."""
    count, left_out = len(found.steps), found.warm_up
    first, last = found.steps[0], found.steps[-1]
    which = f"1 step compared, {first}" if count == 1 else f"{count} steps compared, {first} to {last}"
    of_each = {0: "no step", 1: "the first step of each run"}.get(left_out, f"the first {left_out} steps of each run")
    return f"times of {which}; {of_each} left out (--warm-up {left_out})"


def interval_text(interval: Interval, digits: int = 2, form: str = "") -> str:
    """Return value and bounds, as "0.74 [0.70, 0.79]"."""
    value, *bounds = (
        f"{number:{form}.{digits}f}" for number in (interval.value, interval.low, interval.high) if number is not None
    )
    return f"{value} [{', '.join(bounds)}]" if bounds else value


def difference_text(interval: Interval) -> str:
    """Return the text of `interval_text` with signs, and with as many digits as tell the bounds apart: "+0.013 [-0.003,
    +0.028]"."""
    spread = interval.high - interval.low if interval.low is not None and interval.high is not None else 0.0
    size = spread or abs(interval.value)
    return interval_text(interval, 3 if size == 0 else min(max(0, 1 - math.floor(math.log10(size))), 12), "+")


def count_text(value: float | None) -> str:
    """Return a whole number, or "not logged"."""
    return "not logged" if value is None else f"{value:,.0f}"


# What is told of each of the two runs, by its name.
SAMPLES = "samples trained"
FACTS: dict[str, Callable[[ComparedRun], str]] = {
    "steps": lambda run: str(run.steps),
    "tokens trained": lambda run: count_text(run.tokens),
    SAMPLES: lambda run: count_text(run.samples),
    "samples missing": lambda run: count_text(run.samples_missing),
    "fallbacks": lambda run: count_text(run.fallbacks),
}
