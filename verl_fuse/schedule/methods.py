"""The list of methods; a method added here inherits every invariant test and every command."""

from collections.abc import Callable, Mapping

from verl_fuse.errors import FuseError
from verl_fuse.schedule.annealed import annealed
from verl_fuse.schedule.back_to_back import back_to_back
from verl_fuse.schedule.exact import exact
from verl_fuse.schedule.greedy import greedy
from verl_fuse.schedule.portfolio import portfolio
from verl_fuse.schedule.serial import serial
from verl_fuse.schedule.solution import Bounds, Budget, Solution, finish, trivial_bounds
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.problem import Problem
from verl_fuse.spec.schedule import Schedule

Method = Callable[[OpTable, Budget], Solution | tuple[Solution, Bounds]]

METHODS: Mapping[str, Method] = {
    "serial": serial,
    "back-to-back": back_to_back,
    "greedy": greedy,
    "annealed": annealed,
    "exact": exact,
    "portfolio": portfolio,
}


def solve(problem: Problem, method: str, budget: Budget) -> Schedule:
    """Run one method and check its result; a FuseError names the methods when `method` is not one."""
    if method not in METHODS:
        raise FuseError(f"method={method!r}; allowed: {', '.join(METHODS)}")
    table = OpTable(problem)
    result = METHODS[method](table, budget)
    solution, bounds = result if isinstance(result, tuple) else (result, trivial_bounds(table, result.makespan))
    schedule = finish(table, solution, bounds, budget.elapsed, method)
    validate(schedule)
    return schedule
