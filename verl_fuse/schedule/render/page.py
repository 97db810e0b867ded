"""A self-contained HTML page: inline SVG, no scripts, nothing fetched."""

from html import escape

from verl_fuse.schedule.render.colors import color
from verl_fuse.schedule.render.curve import labels, memory_curve, summary
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory, in_time

WIDTH, LEFT, ROW, GAP, MEMORY, TOP = 1400, 84, 22, 4, 34, 4


def html_page(schedule: Schedule) -> str:
    """Gantt chart with the bound line, then one memory curve per rank with the limit line."""
    legend = "".join(
        f'<span style="background:{color(i, kind)};color:{"#000" if kind == "F" else "#fff"}">{escape(name)} '
        f"{word}</span>"
        for i, name in enumerate(labels(schedule))
        for kind, word in (("F", "forward"), ("B", "backward"))
    )
    problem = schedule.problem
    limit = f" (limit {in_memory(problem.memory_limit, problem.memory_unit)})" if problem.memory_limit else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pipeline schedule</title><style>'
        "body{font:14px sans-serif;margin:16px}span{padding:2px 8px;margin-right:6px}text{font:10px sans-serif}"
        "h2{font-size:15px;margin:14px 0 4px}</style></head><body>"
        f"<p>{escape(summary(schedule))}</p><p>{legend}</p><h2>Ops by rank</h2>{_gantt(schedule)}"
        f"<h2>Activation memory by rank{limit}</h2>{_memory(schedule)}</body></html>\n"
    )


def _gantt(schedule: Schedule) -> str:
    scale, height = (WIDTH - LEFT - 10) / schedule.makespan, schedule.problem.ranks * (ROW + GAP) + 20
    unit = schedule.problem.time_unit
    parts = [f'<svg width="{WIDTH}" height="{height}" role="img">']
    for rank, row in enumerate(schedule.rows):
        y = rank * (ROW + GAP)
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        for op in row:
            x, width = LEFT + op.start * scale, (op.end - op.start) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{color(op.pipeline, op.kind)}" '
                'stroke="#fff" '
                f'stroke-width=".5"><title>{op.token} {op.start:g} to {in_time(op.end, unit)}</title></rect>'
            )
            if width > 9:
                ink = "#000" if op.kind == "F" else "#fff"
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" '
                    f'fill="{ink}">{op.microbatch}</text>'
                )
    for moment, name in ((schedule.lower_bound, "bound"), (schedule.makespan, "end")):
        x = LEFT + moment * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{height - 14}" stroke="#c00" stroke-dasharray="4 2"/>'
        )
        label = f"{name} {in_time(moment, unit)}"
        parts.append(f'<text x="{x - 3:.2f}" y="{height - 3}" text-anchor="end" fill="#c00">{label}</text>')
        if schedule.optimal:
            break
    return "".join(parts) + "</svg>"


def _memory(schedule: Schedule) -> str:
    top = max(schedule.peak_memory, schedule.problem.memory_limit or 0.0) or 1.0
    scale = (WIDTH - LEFT - 10) / schedule.makespan
    parts = [f'<svg width="{WIDTH}" height="{TOP + schedule.problem.ranks * (MEMORY + GAP)}" role="img">']
    for rank, row in enumerate(schedule.rows):
        floor = TOP + rank * (MEMORY + GAP) + MEMORY
        steps = memory_curve(schedule, row)
        path = [f"M{LEFT} {floor}"]
        for moment, held in steps:
            path.append(f"H{LEFT + moment * scale:.2f}V{floor - held / top * MEMORY:.2f}")
        path.append(f"H{LEFT + schedule.makespan * scale:.2f}V{floor}Z")
        peak = in_memory(max(held for _, held in steps), schedule.problem.memory_unit, "")
        parts.append(f'<text x="4" y="{floor - 18}">rank {rank}</text><text x="4" y="{floor - 5}">peak {peak}</text>')
        parts.append(f'<path d="{"".join(path)}" fill="#9bd" stroke="#357"/>')
        if schedule.problem.memory_limit:
            y = floor - schedule.problem.memory_limit / top * MEMORY
            parts.append(
                f'<line x1="{LEFT}" y1="{y:.2f}" x2="{WIDTH - 10}" y2="{y:.2f}" stroke="#c00" stroke-dasharray="4 2"/>'
            )
    return "".join(parts) + "</svg>"
