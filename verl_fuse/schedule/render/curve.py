"""Draws activation memory over time, and the one-line summary that every picture carries."""

from verl_fuse.spec.schedule import Op, Schedule
from verl_fuse.spec.units import in_memory, in_time


def memory_curve(schedule: Schedule, row: tuple[Op, ...]) -> list[tuple[float, float]]:
    """Return steps (time, memory held from then on) of the rank whose ops are `row`; all memory freed and taken at one
    moment is one step."""
    changes: dict[float, float] = {0.0: 0.0}
    for op in row:
        pipeline = schedule.problem.pipelines[op.pipeline]
        size = pipeline.activation[pipeline.ranks.index(op.rank)]
        moment, change = (op.start, size) if op.kind == "F" else (op.end, -size)
        changes[moment] = changes.get(moment, 0.0) + change
    held, steps = 0.0, []
    for moment, change in sorted(changes.items()):
        held = round(held + change, 9)
        steps.append((moment, held))
    return steps


def summary(schedule: Schedule) -> str:
    """Return makespan and peak memory, each against its bound."""
    units = schedule.problem.time_unit, schedule.problem.memory_unit
    time = "optimal" if schedule.optimal else f"bound {in_time(schedule.lower_bound, units[0])}"
    bound = in_memory(schedule.memory_lower_bound, units[1])
    memory = "optimal at this makespan" if schedule.memory_optimal else f"bound {bound}"
    return (
        f"{schedule.method}: makespan {in_time(schedule.makespan, units[0])} ({time}), bubbles {schedule.bubble:.1%}, "
        f"peak memory {in_memory(schedule.peak_memory, units[1])} ({memory}), solved in {schedule.solve_seconds:.1f} s"
    )


def labels(schedule: Schedule) -> list[str]:
    """Return a name for each pipeline: its model, with the copy's number when there are several."""
    models = [p.model for p in schedule.problem.pipelines]
    return [
        model if models.count(model) == 1 else f"{model} {models[:i].count(model)}" for i, model in enumerate(models)
    ]
