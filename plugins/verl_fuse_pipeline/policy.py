"""Choose the schedule of an update."""

from typing import Literal

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule

# A predicted gain below this share counts as none.
LEAST_GAIN = 0.01


def fused_schedule(problem: ScheduleProblem, wanted: Literal["auto", "fused"], seconds: float) -> Schedule | None:
    """Return the best schedule found in `seconds` seconds; with "auto" None unless the schedule is predicted to take
    less time than one model after the other."""
    # The solver has one thread, because it runs beside a rollout.
    schedule = solve(problem, "portfolio", Budget(seconds, workers=1))
    if wanted == "auto" and schedule.makespan > (1 - LEAST_GAIN) * serial_seconds(problem):
        return None
    return schedule


def serial_seconds(problem: ScheduleProblem) -> float:
    """Return the seconds of the models one after the other, without a limit on memory: each model then has all
    memory."""
    return solve(
        ScheduleProblem(problem.ranks, problem.pipelines, None, problem.transfer), "serial", Budget(60.0)
    ).makespan
