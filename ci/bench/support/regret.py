"""Judge a policy's choices beside choices that never change: seconds of each step against the replica-seconds held for
the step.

Invariants (tests/unit/bench/test_regret.py):
- a step's objective is that of the policy itself: the weighted sum of seconds and replica-seconds, both relative to all
  replicas;
- regret is against the best fixed choice of each step, known afterwards: regret is 0 for a policy that always made that
  choice, and may be below 0 only for a policy whose choice no fixed choice makes;
- the frontier has the choices for which no other choice is both faster and cheaper, over all steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS = (0.2, 0.5, 0.8)


@dataclass(frozen=True, slots=True)
class Taken:
    """The cost of one step: seconds, and replica-seconds until each replica was given up."""

    seconds: float
    held: float


Choices = Mapping[str, Sequence[Taken]]
"""The steps of each choice; steps at the same place have the same lengths."""


def objective(step: Taken, whole: Taken, weight: float) -> float:
    """Return the weighted sum of a step's seconds and replica-seconds. `whole`: the step with all replicas; `weight` 0
    (time only) to 1 (cost only)."""
    return (1 - weight) * step.seconds / whole.seconds + weight * step.held / whole.held


def regret(policy: Sequence[Taken], fixed: Choices, most: str, weight: float) -> float:
    """Return the share of the best by which the policy's objective, summed over steps, lies above the best; `most` is
    the choice of all replicas."""
    spent = best = 0.0
    for place, (step, whole) in enumerate(zip(policy, fixed[most], strict=True)):
        spent += objective(step, whole, weight)
        best += min(objective(choice[place], whole, weight) for choice in fixed.values())
    return spent / best - 1


def total(steps: Sequence[Taken]) -> Taken:
    return Taken(sum(step.seconds for step in steps), sum(step.held for step in steps))


def frontier(choices: Choices) -> dict[str, Taken]:
    """Return the totals of the choices that are worth being made, the fastest first."""
    totals = {name: total(steps) for name, steps in choices.items()}
    kept = {name: one for name, one in totals.items() if not beaten(one, totals)}
    return dict(sorted(kept.items(), key=lambda item: item[1].seconds))


def beaten(one: Taken, by: Mapping[str, Taken]) -> list[str]:
    """Return the choices that are faster and cheaper."""
    return [name for name, other in by.items() if other.seconds < one.seconds and other.held < one.held]


def judged(policies: Mapping[float, Sequence[Taken]], fixed: Choices, most: str) -> dict[str, dict]:
    """Return for the JSON line the fixed choices, with whether they are worth being made, and the policy at each cost
    weight."""
    totals, worth = {name: total(steps) for name, steps in fixed.items()}, frontier(fixed)
    return {
        "fixed": {
            name: {"seconds": round(one.seconds, 2), "replica_seconds": round(one.held, 2), "frontier": name in worth}
            for name, one in totals.items()
        },
        "policy": {
            str(weight): {
                "seconds": round(total(steps).seconds, 2),
                "replica_seconds": round(total(steps).held, 2),
                "regret": round(regret(steps, fixed, most, weight), 4),
                "beaten_by": beaten(total(steps), totals),
            }
            for weight, steps in policies.items()
        },
    }
