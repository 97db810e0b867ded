"""Draws Gantt chart and memory curves with matplotlib, as .svg or .png."""

from io import BytesIO
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.extras import install
from verl_fuse.schedule.render.colors import color
from verl_fuse.schedule.render.curve import labels, memory_curve, summary
from verl_fuse.spec.files import save
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory, in_time


def save_plot(schedule: Schedule, path: Path) -> None:
    """Write the picture; a FuseError names the extra when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise FuseError(
            f"{path}: {path.suffix} needs matplotlib: {install('plot')} (.html and .txt need nothing)"
        ) from error
    ranks = schedule.problem.ranks
    figure = Figure(figsize=(15, 2.2 + 0.52 * ranks), layout="constrained")
    gantt, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for rank, row in enumerate(schedule.rows):
        spans = [(op.start, op.end - op.start) for op in row]
        gantt.broken_barh(
            spans,
            (rank - 0.42, 0.84),
            facecolors=[color(op.pipeline, op.kind) for op in row],
            edgecolor="white",
            linewidth=0.3,
        )
        steps = [*memory_curve(schedule, row), (schedule.makespan, 0.0)]
        memory.step(
            [t for t, _ in steps], [m for _, m in steps], where="post", linewidth=0.9, label=f"rank {rank}", alpha=0.8
        )
    limits = {"color": "#c00", "linestyle": "--", "linewidth": 1}
    units = schedule.problem.time_unit, schedule.problem.memory_unit
    label = f"bound {in_time(schedule.lower_bound, units[0])}"
    bound = gantt.axvline(schedule.lower_bound, label=label, **limits)
    gantt.set(ylabel="rank", yticks=range(ranks), xlim=(0, schedule.makespan * 1.01))
    gantt.invert_yaxis()
    gantt.set_title(summary(schedule), fontsize=10)
    bars = [
        Patch(color=color(i, kind), label=f"{name} {word}")
        for i, name in enumerate(labels(schedule))
        for kind, word in (("F", "forward"), ("B", "backward"))
    ]
    gantt.legend(handles=[*bars, bound], loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    memory.set(
        ylabel=f"activation memory ({units[1] or 'units'})", xlabel=f"time ({units[0] or 'units'})", ylim=(0, None)
    )
    if schedule.problem.memory_limit is not None:
        limit = schedule.problem.memory_limit
        memory.axhline(limit, label=f"limit {in_memory(limit, units[1])}", **limits)
    if ranks <= 16:
        memory.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=110)
    save(path, picture.getvalue())
