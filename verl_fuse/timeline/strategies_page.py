"""Writes RUN_DIR/strategies.html: simulated strategies side by side, on one time scale.

Invariant (tests/unit/timeline/test_pages.py): the page needs no second file and no script.
"""

from collections.abc import Mapping, Sequence

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.html import fill, percent, seconds, style, text, work_of
from verl_fuse.timeline.picture import picture
from verl_fuse.timeline.summary import StepSummary, summarize
from verl_fuse.timeline.terms import hint


def strategies_page(
    title: str,
    steps: Sequence[tuple[str, Timeline]],
    figures: Mapping[str, tuple[float, float, float]],
    links: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """Write the page. `steps`: (strategy, one step of it), stock first. By strategy, `figures` are the seconds of a
    step, the speed-up over stock and the idle share over all its steps, `links` the address of the step's page."""
    summaries = [(name, summarize(timeline)) for name, timeline in steps]
    longest = max(summary.seconds for _, summary in summaries)
    return fill(
        "strategies.html",
        {
            "page_style": style(),
            "title": text(title),
            "picture": picture(steps),
            "idle": hint("idle"),
            "long_tail": hint("long tail"),
            "rows": "".join(_row(name, found, figures[name], longest, links) for name, found in summaries),
            "notes": "".join(f"<li>{text(note)}</li>" for note in notes),
        },
    )


def _row(
    name: str, summary: StepSummary, figures: tuple[float, float, float], longest: float, links: Mapping[str, str]
) -> str:
    step, speedup, idle = figures
    parts = "".join(
        f'<i style="width:{value / longest * 100:.2f}%;background:var(--{work_of(stage, "stage")})" '
        f'title="{text(stage)}: {seconds(value)}"></i>'
        for stage, value in summary.stages
    )
    link = f'<a href="{text(links[name])}">chart</a>' if name in links else ""
    cells = (seconds(step), f"{speedup:.2f}", percent(idle), percent(summary.long_tail_fraction))
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{text(name)}</th>{numbers}<td class=wide><div class=stack>{parts}</div></td><td>{link}</td></tr>"
