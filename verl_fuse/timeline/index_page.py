"""RUN_DIR/timeline.html: every step of the run with its stages, idle share and links."""

from collections.abc import Mapping, Sequence

from verl_fuse.timeline.html import STAGE_WORK, fill, percent, seconds, style, text, work_of
from verl_fuse.timeline.summary import StepSummary


def index_page(run: str, summaries: Sequence[StepSummary], links: Mapping[str, str]) -> str:
    """Write the index, newest step first; `links` maps the name of each step file that exists to its address."""
    longest = max((summary.seconds for summary in summaries), default=0.0)
    used = {work_of(name, "stage") for summary in summaries for name, _ in summary.stages}
    names = dict.fromkeys((*STAGE_WORK.values(), "stage"))
    labels = {"stage": "other stages"}
    legend = (
        f'<li><i style="background:var(--{name})"></i>{labels.get(name, name)}</li>' for name in names if name in used
    )
    return fill(
        "index.html",
        {
            "page_style": style(),
            "title": text(f"Timeline · {run}"),
            "run": text(run),
            "count": f"{len(summaries)} step" + ("" if len(summaries) == 1 else "s"),
            "mean": seconds(sum(summary.seconds for summary in summaries) / len(summaries) if summaries else None),
            "legend": "".join(legend),
            "rows": "".join(_row(summary, longest, links) for summary in reversed(summaries)),
        },
    )


def _row(summary: StepSummary, longest: float, links: Mapping[str, str]) -> str:
    def link(suffix: str, label: str) -> str:
        name = f"step_{summary.step:06d}.{suffix}"
        return f'<a href="{text(links[name])}">{label}</a>' if name in links else ""

    scale = 100 / longest if longest else 0.0
    parts = "".join(
        f'<i style="width:{value * scale:.2f}%;background:var(--{work_of(name, "stage")})" title="{text(name)}: '
        f'{seconds(value)}"></i>'
        for name, value in summary.stages
    )
    cells = (
        f"<td>{seconds(summary.seconds)}</td><td class=wide><div class=stack>{parts}</div></td>"
        f"<td>{percent(summary.idle_overall)}</td><td>{percent(summary.long_tail_fraction)}</td>"
    )
    return f"<tr><th>{summary.step}</th>{cells}<td>{link('html', 'chart')}{link('perfetto.json', 'perfetto')}</td></tr>"
