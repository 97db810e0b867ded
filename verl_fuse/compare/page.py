"""Writes a comparison as one self-contained HTML page.

Invariants (tests/unit/compare/test_compare_page.py):
- every figure of the text is in the page without a script, but for rows that are 0 in both runs, which are named;
- text from a run never becomes markup; a page needs no network and no second file.
The script (assets/compare.js) draws the curves, by step or over hours of training, and moves one cursor over them all.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from verl_fuse.compare.comparison import ComparedRun, Comparison, Curve
from verl_fuse.compare.verdict import FACTS, SAMPLES, compared, count_text, difference_text, interval_text, verdict
from verl_fuse.timeline.html import asset, fill, head, percent, seconds, stage_legend, text, work_of

# The size of a curve's drawing in its own units: the whole, and the room for the numbers at its axes.
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_BOTTOM, CHART_TOP = 560, 180, 70, 20, 8


# Seconds that a table shows as 0.
_NOTHING = 0.0005


def page(found: Comparison, remarks: Iterable[str], timelines: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the page. `timelines`: addresses of the runs' timelines, of "base" and "fused", as far as there are."""
    timed = [stage for stage in found.stages if max(abs(stage.base), abs(stage.fused)) >= _NOTHING]
    untimed = [stage.name for stage in found.stages if stage not in timed]
    longest = max(found.base.seconds.value, found.fused.seconds.value)
    return fill(
        "compare.html",
        {
            "head": head(f"{found.fused.name} against {found.base.name}", scripted=True),
            "base": _run("base", found.base, timelines),
            "fused": _run("fused", found.fused, timelines),
            "verdict": text(_sentence(verdict(found))),
            "compared": f"95 % intervals; {compared(found)}",
            "notes": "".join(f"<li>{text(remark)}</li>" for remark in remarks),
            "cards": _cards(found),
            "legend": stage_legend((stage.name for stage in found.stages), "other"),
            "bars": _bar("base", found, longest) + _bar("fused", found, longest),
            "stages": "".join(
                f"<tr><th>{text(stage.name)}</th><td>{stage.base:.3f} s</td><td>{stage.fused:.3f} s</td>"
                f"<td>{interval_text(stage.difference, 3, '+')} s</td></tr>"
                for stage in (*timed, found.whole)
            ),
            "untimed": _hidden("0 s in both", untimed),
            "runs": _runs(found.base, found.fused),
            "switch": _switch(found) if found.curves else "",
            "curves": "".join(_section(curve, found) for curve in found.curves),
            "script": asset("compare.js"),
        },
    )


def _switch(found: Comparison) -> str:
    return (
        f'<section id="curves" class="bar-top" data-base="{_pairs(found.base.elapsed)}" '
        f'data-fused="{_pairs(found.fused.elapsed)}"><h2>Curves</h2><label><input type="checkbox" id="by-time"> over '
        'the time that the steps took</label><span class="hint">one cursor moves over all curves</span></section>'
    )


def _pairs(values: Mapping[int, float]) -> str:
    """Return "step value" of every step."""
    return ",".join(f"{step} {value:.6g}" for step, value in values.items())


def _run(which: str, run: ComparedRun, timelines: Mapping[str, str]) -> str:
    link = f' (<a href="{text(timelines[which])}">timeline</a>)' if which in timelines else ""
    return f"{which}: {text(run.name)}{link}"


def _hidden(why: str, names: Sequence[str]) -> str:
    """Return a line that names the rows that are left out."""
    return f'<p class="hint">{why}: {text(", ".join(names))}</p>' if names else ""


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _cards(found: Comparison) -> str:
    cards = [
        ("Speed-up", interval_text(found.speedup), "base seconds over fused seconds"),
        ("Fused step", interval_text(found.fused.seconds), "seconds"),
        ("Base step", interval_text(found.base.seconds), "seconds"),
        ("Fallbacks", count_text(found.fused.fallbacks), "times a policy failed and the step went on as stock"),
    ]
    return "".join(
        f"<div><span>{name}</span><b>{text(value)}</b><small>{note}</small></div>" for name, value, note in cards
    )


def _bar(which: str, found: Comparison, longest: float) -> str:
    """Return the bar with the stages of a run's mean step, on the scale of the longer step."""
    parts = "".join(
        f'<i style="width:{100 * max(value, 0.0) / longest:.2f}%;background:var(--{work_of(stage.name, "stage")})" '
        f'title="{text(stage.name)}: {seconds(value)}, {percent(value / whole)}"></i>'
        for stage in found.stages
        for value, whole in [(getattr(stage, which), getattr(found, which).seconds.value)]
    )
    return (
        f"<tr><th>{which}</th><td>{seconds(getattr(found, which).seconds.value)}</td>"
        f'<td class="wide" style="width:80%"><div class="stack">{parts}</div></td></tr>'
    )


def _runs(base: ComparedRun, fused: ComparedRun) -> str:
    asked = {SAMPLES: f"{SAMPLES} (base: asked for)"} if base.stock else {}
    rows = [(asked.get(name, name), fact(base), fact(fused)) for name, fact in FACTS.items()]
    empty = {"0", count_text(None)}
    shown = [row for row in rows if not {row[1], row[2]} <= empty]
    lines = "".join(f"<tr><th>{name}</th><td>{one}</td><td>{other}</td></tr>" for name, one, other in shown)
    hidden = _hidden("0 or not logged in both", [row[0] for row in rows if row not in shown])
    head = "<thead><tr><th></th><th>base</th><th>fused</th></tr></thead>"
    return f"<table>{head}<tbody>{lines}</tbody></table>{hidden}"


def _section(curve: Curve, found: Comparison) -> str:
    return (
        f"<section><h2>{text(curve.name)}</h2>"
        f'<span class="hint">{text(curve.metric)}; fused − base {difference_text(curve.difference)}; grey: base, blue: '
        "fused</span><output></output>"
        f"{_drawing(curve, found)}</section>"
    )


def _drawing(curve: Curve, found: Comparison) -> str:
    values = [*curve.base.values(), *curve.fused.values()]
    steps = sorted(curve.base.keys() | curve.fused.keys())
    low, high, first, last = min(values), max(values), steps[0], steps[-1]
    right, bottom = CHART_WIDTH - 8, CHART_HEIGHT - CHART_BOTTOM
    levels = {low: bottom, high: CHART_TOP} if low < high else {low: (bottom + CHART_TOP) / 2}
    ends = {first: CHART_LEFT, last: right} if first < last else {first: (CHART_LEFT + right) / 2}
    axes = "".join(
        f'<line x1="{CHART_LEFT}" x2="{CHART_WIDTH}" y1="{y:g}" y2="{y:g}"/><text x="{CHART_LEFT - 4}" y="{y + 4:g}" '
        f'text-anchor="end">{value:.3g}</text>'
        for value, y in levels.items()
    ) + "".join(
        f'<text class="end" x="{x:g}" y="{CHART_HEIGHT - 4}" text-anchor="middle">{step}</text>'
        for step, x in ends.items()
    )
    lines = "".join(
        f'<polyline class="{name}" data-values="{_pairs(points)}"/>'
        for name, points in (("base", curve.base), ("fused", curve.fused))
    )
    return (
        f'<svg class="curve" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{text(curve.name)} by '
        f'step" data-sides="{CHART_LEFT} {right} {CHART_TOP} {bottom}">{axes}{lines}</svg>'
    )
