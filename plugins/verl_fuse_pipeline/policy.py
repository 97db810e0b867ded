"""The choice of an update's schedule."""

from typing import Literal

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule

# A prediction that is better by less than this is none.
LEAST_GAIN = 0.01


def fused_schedule(problem: ScheduleProblem, wanted: Literal["auto", "fused"], seconds: float) -> Schedule | None:
    """The best schedule found in so many seconds; with "auto" None unless it is predicted to take less time than
    one model after the other."""
    # One thread: the solver runs beside a rollout.
    schedule = solve(problem, "portfolio", Budget(seconds, workers=1))
    if wanted == "auto" and schedule.makespan > (1 - LEAST_GAIN) * serial_seconds(problem):
        return None
    return schedule


def serial_seconds(problem: ScheduleProblem) -> float:
    """Seconds of the models one after the other; without a limit on memory, as then each has all of it."""
    return solve(
        ScheduleProblem(problem.ranks, problem.pipelines, None, problem.transfer), "serial", Budget(60.0)
    ).makespan
