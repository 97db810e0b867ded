"""Writes a self-contained HTML page: inline SVG as wide as the window, no second file.

Places along the time axis are shares of the width, so a narrow window squeezes ops and leaves the words as they are. A
rank has its ops as text, "token start end" each, from which SCRIPT draws them.
"""

import math
from html import escape

from verl_fuse.schedule.render.colors import color, ink
from verl_fuse.schedule.render.curve import labels, memory_curve, summary
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory, in_time

LEFT, RIGHT, ROW, GAP, MEMORY, HEAD, FOOT = 88, 16, 22, 4, 40, 40, 26
STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1c2430; --soft: #667181; --line: #d9dee5; --ground: #fff; --bound: #b3261e;
  --held: #9bbfdd; --edge: #33658a; --stripe: #c94f4f66; --bubble: #d9a3a333; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ee; --soft: #97a1af; --line: #39424d; --ground: #14181d; --bound: #ff8a80;
    --held: #2f5675; --edge: #8fc1e6; }}
}}
body {{ font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; margin: 16px;
  color: var(--ink); background: var(--ground); }}
h1 {{ font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 15px; margin: 16px 0 4px; }}
p span {{ display: inline-block; padding: 1px 8px; margin: 0 6px 4px 0; border-radius: 3px; }}
p .bubble {{ background: repeating-linear-gradient(135deg, var(--stripe) 0 2px, var(--bubble) 2px 6px); }}
body > svg {{ display: block; overflow: visible; margin-left: {LEFT}px; width: calc(100% - {LEFT + RIGHT}px); }}
text {{ font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }}
.soft {{ fill: var(--soft); }}
.grid {{ stroke: var(--line); }}
.op {{ stroke: var(--ground); stroke-width: .5; }}
.bound {{ stroke: var(--bound); stroke-dasharray: 4 2; stroke-width: 1.5; }}
.label {{ fill: var(--bound); font-size: 12px; font-weight: 600; }}
.held {{ fill: var(--held); stroke: var(--edge); vector-effect: non-scaling-stroke; }}
@media (max-width: 1000px) {{ .tight {{ display: none; }} }}
"""
SCRIPT = """
// Shares of the makespan: an op at least so long has room for its number in a wide window, and in one of 700 pixels.
const WIDE = 0.007, NARROW = 0.018;
for (const rank of document.querySelectorAll("[data-ops]")) {
  const { makespan, unit } = rank.parentElement.dataset, percent = (time) => `${100 * time / makespan}%`;
  rank.innerHTML = rank.dataset.ops.split(",").map((op) => {
    const [token, start, end] = op.split(" "), [pipeline, kind, number] = token.split(/([FB])/);
    const share = (end - start) / makespan, middle = percent((Number(start) + Number(end)) / 2);
    const room = share > NARROW ? "" : "tight";
    return `<rect class="op ${kind}${pipeline}" x="${percent(start)}" width="${percent(end - start)}" height="100%">` +
      `<title>${token} ${start} to ${end} ${unit}</title></rect>` +
      (share > WIDE ? `<text class="${room}" x="${middle}" y="15" text-anchor="middle">${number}</text>` : "");
  }).join("");
}
"""
BUBBLE = (
    '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" style="fill:var(--bubble)"/><rect width="2" height="6" style="fill:var(--stripe)"/>'
    "</pattern></defs>"
)


def html_page(schedule: Schedule) -> str:
    """Return a Gantt chart with the bound line, then one memory curve per rank with the limit line."""
    kinds = [
        (f"{kind}{index}", f"{name} {word}", color(index, kind), ink(index, kind))
        for index, name in enumerate(labels(schedule))
        for kind, word in (("F", "forward"), ("B", "backward"))
    ]
    colours = "".join(
        f".{kind} {{ fill: {ground}; background: {ground}; color: {words}; }} .{kind} + text {{ fill: {words}; }}\n"
        for kind, _, ground, words in kinds
    )
    legend = "".join(f'<span class="{kind}">{escape(name)}</span>' for kind, name, _, _ in kinds)
    problem = schedule.problem
    limit = f", limit {in_memory(problem.memory_limit, problem.memory_unit)}" if problem.memory_limit else ""
    models = " and ".join(labels(schedule))
    title = f"Pipeline schedule of {models} on {problem.ranks} ranks"
    high = in_memory(_height(schedule), problem.memory_unit)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}{colours}</style></head>"
        f"<body><h1>{escape(title)}</h1><p>{escape(summary(schedule))}</p>"
        f'<p>{legend}<span class="bubble">idle (bubble)</span></p>'
        f"<h2>Ops by rank; a number is a micro-batch, time in {escape(problem.time_unit or 'units')}</h2>"
        f"{_gantt(schedule)}<h2>Activation memory by rank{limit}; each row is {high} high</h2>"
        f"{_memory(schedule)}<script>{SCRIPT}</script></body></html>\n"
    )


def _share(schedule: Schedule, seconds: float) -> str:
    return f"{100 * seconds / schedule.makespan:.3f}%"


def _axis(schedule: Schedule, top: float, bottom: float) -> str:
    """Return vertical lines at round times, from `top` to `bottom`, with their labels below."""
    about = schedule.makespan / 10
    power = 10 ** math.floor(math.log10(about))
    step = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= about)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    parts = []
    for index in range(int(schedule.makespan / step + 1e-9) + 1):
        x = _share(schedule, index * step)
        parts.append(
            f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
            f'<text class="soft" x="{x}" y="{bottom + 14}" text-anchor="middle">{index * step:.{digits}f}</text>'
        )
    return "".join(parts)


def _gantt(schedule: Schedule) -> str:
    bottom = HEAD + schedule.problem.ranks * (ROW + GAP)
    unit = schedule.problem.time_unit
    data = f'data-makespan="{schedule.makespan}" data-unit="{escape(unit or "units of time")}"'
    parts = [f'<svg height="{bottom + FOOT}" role="img" {data}>', BUBBLE, _axis(schedule, HEAD, bottom)]
    for rank, row in enumerate(schedule.rows):
        y = HEAD + rank * (ROW + GAP)
        parts.append(f'<text x="{4 - LEFT}" y="{y + 15}">rank {rank}</text>')
        parts.append(f'<rect y="{y}" width="100%" height="{ROW}" fill="url(#bubble)"/>')
        ops = ",".join(f"{op.token} {op.start:g} {op.end:g}" for op in row)
        parts.append(f'<svg y="{y}" width="100%" height="{ROW}" data-ops="{ops}"></svg>')
    moments = [("end, optimal", schedule.makespan)] if schedule.optimal else _apart(schedule)
    # The end's label is above the bound's, whose line begins below both.
    for index, (name, moment) in enumerate(reversed(moments)):
        x, y = _share(schedule, moment), 13 + 15 * index
        parts.append(f'<line class="bound" x1="{x}" y1="{y + 4}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text class="label" x="{x}" y="{y}" text-anchor="end">{name} {in_time(moment, unit)}</text>')
    return "".join(parts) + "</svg>"


def _apart(schedule: Schedule) -> list[tuple[str, float]]:
    """Return labels for bound and end; one label for both where their lines would lie on each other."""
    if schedule.makespan - schedule.lower_bound < 0.01 * schedule.makespan:
        bound = in_time(schedule.lower_bound, schedule.problem.time_unit)
        return [(f"bound {bound}, end", schedule.makespan)]
    return [("bound", schedule.lower_bound), ("end", schedule.makespan)]


def _drawn_limit(schedule: Schedule) -> float | None:
    """Return the limit, or None where it is far above the peak: the heading alone names it then."""
    limit = schedule.problem.memory_limit
    return limit if limit is not None and limit <= 1.25 * (schedule.peak_memory or 1.0) else None


def _height(schedule: Schedule) -> float:
    """Return the memory, in the problem's unit, that the height of a row stands for."""
    return max(schedule.peak_memory or 1.0, _drawn_limit(schedule) or 0.0)


def _memory(schedule: Schedule) -> str:
    """Return the memory curves, all on one scale."""
    top, drawn = _height(schedule), _drawn_limit(schedule)
    bottom = 4 + schedule.problem.ranks * (MEMORY + GAP)
    parts = [f'<svg height="{bottom + FOOT}" role="img">', _axis(schedule, 4, bottom)]
    for rank, row in enumerate(schedule.rows):
        y = 4 + rank * (MEMORY + GAP)
        steps = memory_curve(schedule, row)
        parts.append(f'<line class="grid" x1="0" y1="{y}" x2="100%" y2="{y}"/>')
        path = [f"M0 {MEMORY}"]
        for moment, held in steps:
            path.append(f"H{1000 * moment / schedule.makespan:.1f}V{MEMORY - held / top * MEMORY:.1f}")
        path.append(f"H1000V{MEMORY}Z")
        peak = in_memory(max(held for _, held in steps), schedule.problem.memory_unit, "")
        parts.append(
            f'<text x="{4 - LEFT}" y="{y + MEMORY - 20}">rank {rank}</text>'
            f'<text class="soft" x="{4 - LEFT}" y="{y + MEMORY - 6}">peak {peak}</text>'
        )
        parts.append(
            f'<svg y="{y}" width="100%" height="{MEMORY}" viewBox="0 0 1000 {MEMORY}" preserveAspectRatio="none">'
            f'<path class="held" d="{"".join(path)}"/></svg>'
        )
        if drawn is not None:
            height = y + MEMORY - drawn / top * MEMORY
            parts.append(f'<line class="bound" x1="0" y1="{height:.2f}" x2="100%" y2="{height:.2f}"/>')
    return "".join(parts) + "</svg>"
