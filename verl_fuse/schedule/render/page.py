"""A self-contained HTML page: inline SVG as wide as the window, no scripts, nothing fetched."""

import math
from html import escape

from verl_fuse.schedule.render.colors import color
from verl_fuse.schedule.render.curve import labels, memory_curve, summary
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory, in_time

WIDTH, LEFT, RIGHT, ROW, GAP, MEMORY, HEAD, FOOT = 1400, 112, 16, 22, 4, 40, 22, 26
STYLE = """
:root { --ink: #1c2430; --soft: #667181; --line: #d9dee5; --ground: #fff; --bound: #b3261e;
  --held: #9bbfdd; --edge: #33658a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #97a1af; --line: #39424d; --ground: #14181d; --bound: #ff8a80;
    --held: #2f5675; --edge: #8fc1e6; }
}
body { font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; margin: 16px;
  color: var(--ink); background: var(--ground); }
h2 { font-size: 15px; margin: 16px 0 4px; }
p span { display: inline-block; padding: 1px 8px; margin: 0 6px 4px 0; border-radius: 3px; }
svg { display: block; width: 100%; height: auto; }
text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); }
.grid { stroke: var(--line); }
.bound { stroke: var(--bound); stroke-dasharray: 4 2; stroke-width: 1.5; }
.label { fill: var(--bound); font-size: 12px; font-weight: 600; }
.held { fill: var(--held); stroke: var(--edge); }
"""


def html_page(schedule: Schedule) -> str:
    """Gantt chart with the bound line, then one memory curve per rank with the limit line."""
    legend = "".join(
        f'<span style="background:{color(i, kind)};color:{"#000" if kind == "F" else "#fff"}">{escape(name)} '
        f"{word}</span>"
        for i, name in enumerate(labels(schedule))
        for kind, word in (("F", "forward"), ("B", "backward"))
    )
    problem = schedule.problem
    limit = f", limit {in_memory(problem.memory_limit, problem.memory_unit)}" if problem.memory_limit else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Pipeline schedule</title>'
        f"<style>{STYLE}</style></head><body><p>{escape(summary(schedule))}</p><p>{legend}</p>"
        f"<h2>Ops by rank; a number is a micro-batch, time in {escape(problem.time_unit or 'units')}</h2>"
        f"{_gantt(schedule)}<h2>Activation memory by rank{limit}</h2>"
        f"{_memory(schedule)}</body></html>\n"
    )


def _scale(schedule: Schedule) -> float:
    return (WIDTH - LEFT - RIGHT) / schedule.makespan


def _axis(schedule: Schedule, top: float, bottom: float) -> str:
    """Vertical lines at round times, from `top` to `bottom`, with their labels below."""
    about = schedule.makespan / 10
    power = 10 ** math.floor(math.log10(about))
    step = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= about)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    parts = []
    for index in range(int(schedule.makespan / step + 1e-9) + 1):
        x = LEFT + index * step * _scale(schedule)
        parts.append(
            f'<line class="grid" x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{bottom}"/>'
            f'<text class="soft" x="{x:.2f}" y="{bottom + 14}" text-anchor="middle">{index * step:.{digits}f}</text>'
        )
    return "".join(parts)


def _gantt(schedule: Schedule) -> str:
    scale, bottom = _scale(schedule), HEAD + schedule.problem.ranks * (ROW + GAP)
    unit = schedule.problem.time_unit
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + FOOT}" role="img">', _axis(schedule, HEAD, bottom)]
    for rank, row in enumerate(schedule.rows):
        y = HEAD + rank * (ROW + GAP)
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        for op in row:
            x, width = LEFT + op.start * scale, (op.end - op.start) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{color(op.pipeline, op.kind)}" '
                f'stroke="#fff" stroke-width=".5"><title>{op.token} {op.start:g} to {in_time(op.end, unit)}</title>'
                "</rect>"
            )
            if width > 9:
                ink = "#000" if op.kind == "F" else "#fff"
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" '
                    f'style="fill:{ink}">{op.microbatch}</text>'
                )
    moments = [("end, optimal", schedule.makespan)] if schedule.optimal else _apart(schedule)
    for name, moment in moments:
        x = LEFT + moment * scale
        parts.append(f'<line class="bound" x1="{x:.2f}" y1="{HEAD - 4}" x2="{x:.2f}" y2="{bottom}"/>')
        parts.append(
            f'<text class="label" x="{x:.2f}" y="{HEAD - 8}" text-anchor="end">{name} {in_time(moment, unit)}</text>'
        )
    return "".join(parts) + "</svg>"


def _apart(schedule: Schedule) -> list[tuple[str, float]]:
    """Bound and end; one label for both where two would lie on each other."""
    if (schedule.makespan - schedule.lower_bound) * _scale(schedule) < 110:
        bound = in_time(schedule.lower_bound, schedule.problem.time_unit)
        return [(f"bound {bound}, end", schedule.makespan)]
    return [("bound", schedule.lower_bound), ("end", schedule.makespan)]


def _memory(schedule: Schedule) -> str:
    """Scaled to what is held at most; a limit far above it is named in the heading and not drawn."""
    top = schedule.peak_memory or 1.0
    limit = schedule.problem.memory_limit
    drawn = limit if limit is not None and limit <= 1.25 * top else None
    top = max(top, drawn or 0.0)
    scale, bottom = _scale(schedule), 4 + schedule.problem.ranks * (MEMORY + GAP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + FOOT}" role="img">', _axis(schedule, 4, bottom)]
    for rank, row in enumerate(schedule.rows):
        floor = 4 + rank * (MEMORY + GAP) + MEMORY
        steps = memory_curve(schedule, row)
        path = [f"M{LEFT} {floor}"]
        for moment, held in steps:
            path.append(f"H{LEFT + moment * scale:.2f}V{floor - held / top * MEMORY:.2f}")
        path.append(f"H{LEFT + schedule.makespan * scale:.2f}V{floor}Z")
        peak = in_memory(max(held for _, held in steps), schedule.problem.memory_unit, "")
        parts.append(
            f'<text x="4" y="{floor - 20}">rank {rank}</text>'
            f'<text class="soft" x="4" y="{floor - 6}">peak {peak}</text>'
        )
        parts.append(f'<path class="held" d="{"".join(path)}"/>')
        if drawn is not None:
            y = floor - drawn / top * MEMORY
            parts.append(f'<line class="bound" x1="{LEFT}" y1="{y:.2f}" x2="{WIDTH - RIGHT}" y2="{y:.2f}"/>')
    return "".join(parts) + "</svg>"
