"""Writes a schedule as text: a summary, the grid in proportion to time, and the compact form."""

from verl_fuse.schedule.render.curve import labels, memory_curve, summary
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory

TEXT_COLUMNS = 110


def text_page(schedule: Schedule) -> str:
    """Return the schedule as text. Capital letters are forwards and small letters backwards of pipeline A, B, ...; a
    dot is idle time."""
    scale = TEXT_COLUMNS / schedule.makespan
    lines = [summary(schedule), "  ".join(f"{_letter(i)} = {name}" for i, name in enumerate(labels(schedule)))]
    for rank, row in enumerate(schedule.rows):
        cells = ["."] * TEXT_COLUMNS
        for op in row:
            letter = _letter(op.pipeline) if op.kind == "F" else _letter(op.pipeline).lower()
            first = min(TEXT_COLUMNS - 1, round(op.start * scale))
            last = max(first + 1, min(TEXT_COLUMNS, round(op.end * scale)))
            cells[first:last] = letter * (last - first)
        peak = max(held for _, held in memory_curve(schedule, row))
        lines.append(f"rank {rank:3d} |{''.join(cells)}| peak {in_memory(peak, schedule.problem.memory_unit, '')}")
    return "\n".join([*lines, "", schedule.to_text()])


def _letter(pipeline: int) -> str:
    return chr(ord("A") + pipeline % 26)
