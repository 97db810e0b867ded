"""Lists the methods; a name added here inherits every invariant test and every command.

A method is a function of the same name (`back-to-back` is `back_to_back`) in a module imported on first use: the
constraint solver and the compiler take longer to import than a bad problem takes to refuse.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from verl_fuse.errors import FuseError
from verl_fuse.schedule.solution import Bounds, Budget, Solution, finish, trivial_bounds
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule

Method = Callable[[OpTable, Budget], Solution | tuple[Solution, Bounds]]

METHODS = {
    "serial": "serial",
    "back-to-back": "back_to_back",
    "greedy": "greedy",
    "annealed": "makespan_annealing",
    "exact": "exact",
    "portfolio": "portfolio",
}
"""Modules by method, from the quickest to the best."""


SOLVER, INSTALL = "ortools", "pip install 'verl-fuse[solver]'"


def has_solver() -> bool:
    """Tell whether CP-SAT is installed, which `exact` needs and `portfolio` uses."""
    return find_spec(SOLVER) is not None


def possible_methods() -> list[str]:
    """Return the methods that can run with what is installed."""
    return [method for method in METHODS if method != "exact" or has_solver()]


def require_method(method: str) -> None:
    """Raise a FuseError that names the methods when `method` is none of them, or that tells what it lacks."""
    if method not in METHODS:
        raise FuseError(f"method={method!r}; allowed: {', '.join(METHODS)}")
    if method not in possible_methods():
        raise FuseError(f"method={method!r}: needs OR-tools ({INSTALL}); without: {', '.join(possible_methods())}")


def solve(problem: ScheduleProblem, method: str, budget: Budget) -> Schedule:
    """Run one method and check its result; a FuseError names the methods when `method` is none of them."""
    require_method(method)
    run: Method = getattr(import_module(f"verl_fuse.schedule.{METHODS[method]}"), method.replace("-", "_"))
    table = OpTable(problem)
    result = run(table, budget)
    solution, bounds = result if isinstance(result, tuple) else (result, trivial_bounds(table, result.makespan))
    schedule = finish(table, solution, bounds, budget.elapsed, method)
    validate(schedule)
    return schedule
