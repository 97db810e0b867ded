"""Activation memory over time, and the one-line summary every picture carries."""

from verl_fuse.spec.schedule import Op, Schedule


def memory_curve(schedule: Schedule, row: tuple[Op, ...]) -> list[tuple[float, float]]:
    """Steps (time, memory held from then on) of the rank whose ops are `row`; what is freed and taken at one moment is one step."""
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
    """Makespan and peak memory, each against its bound."""
    time = "optimal" if schedule.optimal else f"bound {schedule.lower_bound:g}"
    memory = "optimal at this makespan" if schedule.memory_optimal else f"bound {schedule.memory_lower_bound:g}"
    return (
        f"{schedule.method}: makespan {schedule.makespan:g} ({time}), bubbles {schedule.bubble:.1%}, "
        f"peak memory {schedule.peak_memory:g} ({memory}), solved in {schedule.solve_seconds:.1f} s"
    )


def labels(schedule: Schedule) -> list[str]:
    """A name for each pipeline: its model, with the copy's number when there are several."""
    models = [p.model for p in schedule.problem.pipelines]
    return [
        model if models.count(model) == 1 else f"{model} {models[:i].count(model)}" for i, model in enumerate(models)
    ]
