"""Writes RUN_DIR/timeline.html: every step of the run with its stages, idle share and links."""

from collections.abc import Mapping, Sequence

from verl_fuse.timeline.html import fill, head, percent, seconds, stacked, stage_legend, text, work_of
from verl_fuse.timeline.summary import StepSummary
from verl_fuse.timeline.terms import hint

TREND_HEIGHT = 180


def index_page(run: str, summaries: Sequence[StepSummary], links: Mapping[str, str]) -> str:
    """Write the index, newest step first; `links` maps the name of each step file that exists to its address."""
    longest = max((summary.seconds for summary in summaries), default=0.0)
    return fill(
        "index.html",
        {
            "head": head(f"Timeline · {run}"),
            "run": text(run),
            "count": f"{len(summaries)} step" + ("" if len(summaries) == 1 else "s"),
            "mean": seconds(sum(summary.seconds for summary in summaries) / len(summaries) if summaries else None),
            "legend": stage_legend(name for summary in summaries for name, _ in summary.stages),
            "trend": trend(summaries) if len(summaries) > 1 else "",
            "idle": hint("idle"),
            "long_tail": hint("long tail"),
            "step": hint("step"),
            "rows": "".join(_row(summary, longest, links) for summary in reversed(summaries)),
        },
    )


def trend(summaries: Sequence[StepSummary]) -> str:
    """Draw the seconds of each step as a stacked bar, oldest first; return an SVG as wide as the page, whose words keep
    their size."""
    longest = max(summary.seconds for summary in summaries) or 1.0
    pitch = 100 / len(summaries)
    scale = (TREND_HEIGHT - 24) / longest
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = TREND_HEIGHT - 18 - share * longest * scale
        parts.append(f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = seconds(share * longest) if share else "0"
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    every = max(1, round(len(summaries) / 12))
    for index, summary in enumerate(summaries):
        middle, y = (index + 0.5) * pitch, TREND_HEIGHT - 18
        for name, value in summary.stages:
            y -= value * scale
            parts.append(
                f'<rect x="{middle - 0.43 * pitch:.3f}%" y="{y:.1f}" width="{0.86 * pitch:.3f}%" '
                f'height="{value * scale:.1f}" fill="var(--{work_of(name, "stage")})">'
                f"<title>step {summary.step}, {text(name)}: {seconds(value)}</title></rect>"
            )
        if index % every == 0:
            parts.append(f'<text x="{middle:.3f}%" y="{TREND_HEIGHT - 4}" text-anchor="middle">{summary.step}</text>')
    return (
        f'<svg class="trend" height="{TREND_HEIGHT}" role="img" aria-label="seconds of each step, by stage">'
        f"{''.join(parts)}</svg>"
    )


def _row(summary: StepSummary, longest: float, links: Mapping[str, str]) -> str:
    def link(suffix: str, label: str) -> str:
        name = f"step_{summary.step:06d}.{suffix}"
        return f'<a href="{text(links[name])}">{label}</a>' if name in links else ""

    bar = stacked(summary.stages, 100 / longest if longest else 0.0)
    cells = (
        f"<td>{seconds(summary.seconds)}</td><td class=wide>{bar}</td>"
        f"<td>{percent(summary.idle_overall)}</td><td>{percent(summary.long_tail_fraction)}</td>"
    )
    return f"<tr><th>{summary.step}</th>{cells}<td>{link('html', 'chart')}{link('perfetto.json', 'perfetto')}</td></tr>"
