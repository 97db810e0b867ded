"""Holds the part of a run that a comparison reads: verl's metrics by step.

Invariants (tests/unit/compare/test_comparison.py):
- the stages of a step and "other" add up to the step;
- stages that verl times beside the step (validation) are no part of the step;
- a critic's update is one stage, wherever in the step it runs;
- a number that is not finite, or too large to calculate with, counts as not logged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from verl_fuse.spec.timeline import UPDATE_CRITIC

# The file's name in a run's folder, and the variable of the driver's environment that has its path for verl.
METRICS_FILE, METRICS_PATH_VARIABLE = "metrics.jsonl", "VERL_FILE_LOGGER_PATH"
TIMING = "timing_s/"
STEP_METRIC = "timing_s/step"
# verl times these stages beside the step, not within it (verl/trainer/ppo/v1/trainer_base.py).
BESIDE = ("testing",)
OTHER = "other"
# Metrics that verl-fuse logs begin with this prefix; stock verl logs no such metric.
METRIC_PREFIX = "fuse/"
_OWN_VALUES = f"{METRIC_PREFIX}update_own_values"
# verl logs it for each role.
_PEAK = "perf/max_memory_reserved_gb"
# No metric of a run is larger; the square of a larger number has no place in a float.
LARGEST_METRIC = 1e100


def stage_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return by name what verl timed in a step with these metrics. A critic's update that computes its own values
    (`fuse.update.skip_values`) runs where verl times the pass for values."""
    # Timings such as "agent_loop/slowest/..." are no stages but statistics of requests.
    timed = ((key.removeprefix(TIMING), value) for key, value in values.items() if key.startswith(TIMING))
    found = {name: value for name, value in timed if "/" not in name}
    if values.get(_OWN_VALUES, 0.0) > 0 and "values" in found:
        found[UPDATE_CRITIC] = found.get(UPDATE_CRITIC, 0.0) + found.pop("values")
    return found


@dataclass(frozen=True)
class RunMetrics:
    """A run's label, its metrics by step, in order, and the number of samples that a step
    asks for (None: not known)."""

    name: str
    steps: Mapping[int, Mapping[str, float]]
    samples_per_step: int | None = None

    @classmethod
    def of(
        cls, name: str, records: Iterable[tuple[int, Mapping[str, float]]], samples_per_step: int | None = None
    ) -> "RunMetrics":
        """Return the metrics of a run from (step, metrics) in the order written; of a metric that was written again for
        a step, the last value counts.

        A step may have several records: a run that goes on after a step begins with a validation of that step.
        """
        found: dict[int, dict[str, float]] = {}
        for step, values in records:
            known = {key: value for key, value in values.items() if abs(value) <= LARGEST_METRIC}
            found[step] = found.get(step, {}) | known
        return cls(name, dict(sorted(found.items())), samples_per_step)

    @property
    def validations(self) -> list[str]:
        """Return the names of the validation accuracies and rewards, in order."""
        logged = {key for values in self.steps.values() for key in values}
        return sorted(key for key in logged if key.startswith("val-") and ("/acc/mean" in key or "/reward/mean" in key))

    @property
    def timed(self) -> list[int]:
        """Return the steps that took time: a record of a validation alone has none."""
        return [step for step, values in self.steps.items() if values.get(STEP_METRIC, 0.0) > 0]

    @property
    def stock(self) -> bool:
        """Tell whether verl-fuse logged nothing."""
        return not any(key.startswith(METRIC_PREFIX) for values in self.steps.values() for key in values)

    def seconds(self, step: int) -> float:
        return self.steps[step][STEP_METRIC]

    def elapsed(self) -> dict[int, float]:
        """Return for each step the seconds of all timed steps up to its end."""
        return dict(
            zip(self.steps, accumulate(self.steps[step].get(STEP_METRIC, 0.0) for step in self.steps), strict=True)
        )

    def stages(self, step: int) -> dict[str, float]:
        """Return the seconds of each stage that verl times within the step, and of all else ("other": weight sync,
        balancing)."""
        beside = (STEP_METRIC.removeprefix(TIMING), *BESIDE)
        found = {name: value for name, value in stage_seconds(self.steps[step]).items() if name not in beside}
        return {**found, OTHER: self.seconds(step) - sum(found.values())}

    @property
    def peak_bytes(self) -> int | None:
        """Return the largest memory peak of any role on a device; None where no role logged one of a device."""
        found = [value for values in self.steps.values() for key, value in values.items() if key.endswith(_PEAK)]
        return round(max(found) * 2**30) or None if found else None

    def metric(self, key: str) -> dict[int, float]:
        """Return a metric by step, of the steps that logged the metric."""
        return {step: values[key] for step, values in self.steps.items() if key in values}

    def samples(self) -> float | None:
        """Return the samples that the timed steps trained on, as verl-fuse counted them; for stock verl, which counts
        none, the number of samples asked for."""
        if counted := self.metric("fuse/samples_trained"):
            return sum(counted.values())
        return None if self.samples_per_step is None else float(self.samples_per_step * len(self.timed))

    def counted(self, key: str) -> float | None:
        """Return the total of a metric that counts over the run, and begins anew where the run is resumed."""
        values = list(self.metric(key).values())
        return (
            sum(now - before if now >= before else now for before, now in pairwise([0.0, *values])) if values else None
        )

    def total(self, key: str) -> float | None:
        """Return the sum of a metric that counts within each step."""
        values = list(self.metric(key).values())
        return sum(values) if values else None
