"""Writes one self-contained HTML page per step: figures, Gantt chart, idle table.

Invariants (tests/unit/timeline/test_pages.py):
- every span of the timeline is in the page's data exactly once, with its name, times and arguments;
- the figures and tables stand in the page without JavaScript.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from verl_fuse.spec.timeline import CATEGORIES, RANK, REPLICA, STEP, Span, Timeline, overlap_seconds
from verl_fuse.timeline.devices import DeviceRow, device_rows, label, largest_idle
from verl_fuse.timeline.html import (
    COLOURS,
    IDLE,
    RESUMED,
    asset,
    colour_of,
    fill,
    head,
    legend,
    packed,
    percent,
    seconds,
    text,
    work_of,
)
from verl_fuse.timeline.idle import IdleRow, IdleTable, idle_table
from verl_fuse.timeline.moves import moves
from verl_fuse.timeline.summary import StepSummary
from verl_fuse.timeline.terms import TERMS, hint
from verl_fuse.timeline.tracks import ordered_tracks, pack, role

# A role with more rows than this starts folded.
_OPEN_ROWS = 20
# Earlier starts are no wall clock (1 January 2000, in Unix seconds): a simulated step begins at 0.
_WALL_CLOCK = 946_684_800


def step_page(timeline: Timeline, summary: StepSummary, run_dir: str = "RUN_DIR") -> str:
    """Write the page. Its size grows with the number of spans: about 25 bytes each. `run_dir`: the run's folder, for
    the command that advises."""
    table, rows = idle_table(timeline), device_rows(timeline)
    used = {colour_of(span) for span in timeline.spans} | {IDLE for row in rows for s in row.stretches if s[0] == IDLE}
    return fill(
        "step.html",
        {
            "head": head(f"Step {timeline.step} · {timeline.run}", scripted=True),
            "run": text(timeline.run),
            "step": str(timeline.step),
            "cards": _cards(summary),
            "idle": _idle(timeline, rows, run_dir),
            "navigation": navigation(None, None),
            "legend": legend([name for name in (*CATEGORIES, RESUMED, IDLE) if name in used]),
            "terms": "".join(f"<dt>{text(term)}</dt><dd>{text(said)}</dd>" for term, said in TERMS.items()),
            "roles": _roles(table),
            "stages": _stages(summary),
            "planned": _planned(summary),
            "tracks": _tracks((*table.devices, *table.rows)),
            "tracks_open": "open" if len(table.rows) + len(table.devices) <= _OPEN_ROWS else "",
            "data": packed(_data(timeline, rows)),
            "script": asset("gantt.js"),
        },
    )


def navigation(before: str | None, after: str | None) -> str:
    """Return links to the pages of the steps before and after, by their file names; a word without a link where there
    is no page."""
    links = ((before, "← previous", "prev"), (after, "next →", "next"))
    parts = [f'<a rel="{rel}" href="{text(to)}">{word}</a>' if to else f"<s>{word}</s>" for to, word, rel in links]
    return f'<nav>{"".join(parts)}<a href="../timeline.html">all steps</a></nav>'


def linked(page: str, before: str | None, after: str | None) -> str:
    """Return the page with other neighbours."""
    return re.sub(r"<nav>.*?</nav>", lambda _: navigation(before, after), page, count=1)


def _data(timeline: Timeline, table: Sequence[DeviceRow]) -> dict[str, Any]:
    """Return the data that the script draws; span = [name, category, colour, start, end, sub-row, arguments], times in
    seconds since the step began; a move is track, sub-row and time where a part of a request ends, and where its rest
    begins; "start" is the step's in Unix seconds, null where it was simulated."""

    def span_data(span: Span, row: int) -> list[Any]:
        colour = colour_of(span)
        start, end = (round(time - timeline.start, 4) for time in (span.start, span.end))
        return [span.name, span.category, colour, start, end, row, dict(span.args)]

    tracks: list[dict[str, Any]] = []
    places: dict[int, tuple[int, int]] = {}
    for track, spans in ordered_tracks(timeline).items():
        rows = pack(spans)
        places |= {id(span): (len(tracks), index) for index, row in enumerate(rows) for span in row}
        drawn = [span_data(span, index) for index, row in enumerate(rows) for span in row]
        tracks.append({"name": track, "role": role(track), "rows": len(rows), "spans": drawn})
    devices = [
        {"name": row.label, "stretches": [[s[0], s[0], s[0], round(s[1], 4), round(s[2], 4), 0] for s in row.stretches]}
        for row in table
        if row.names[0].startswith("device")
    ]
    ends = [
        [
            *places[id(part)],
            round(part.end - timeline.start, 4),
            *places[id(rest)],
            round(rest.start - timeline.start, 4),
        ]
        for part, rest in moves(timeline)
    ]
    return {
        "seconds": timeline.end - timeline.start,
        "start": timeline.start if timeline.start >= _WALL_CLOCK else None,
        "moves": ends,
        "colours": COLOURS,
        "tracks": tracks,
        "devices": devices,
    }


def _cards(summary: StepSummary) -> str:
    hidden = (summary.overlap_seconds or 0.0) / summary.inference_seconds if summary.inference_seconds else None
    cards = [
        ("Step", "step", seconds(summary.seconds), ""),
        (
            "Generation",
            "generation",
            seconds(summary.generation_seconds),
            f"{summary.requests} requests" if summary.requests else "",
        ),
        ("Long tail", "long tail", percent(summary.long_tail_fraction), "of generation, after 80 % of requests"),
        ("Devices idle", "idle", percent(summary.idle_overall), "of the step"),
        ("Inference hidden", "inference", percent(hidden), "inside generation"),
    ]
    return "".join(
        f"<div {hint(term)}><span>{name}</span><b>{text(value)}</b><small>{note}</small></div>"
        for name, term, value, note in cards
    )


def _idle(timeline: Timeline, rows: Sequence[DeviceRow], run_dir: str) -> str:
    """Return a sentence about the largest idle stretch, and the command that advises; nothing where no device is
    known."""
    found = largest_idle(rows)
    if found is None:
        return ""
    row, start, end = found
    stretch = [(timeline.start + start, timeline.start + end)]
    stages = {
        span.name: overlap_seconds(stretch, [(span.start, span.end)]) for span in timeline.on(STEP) if span.seconds
    }
    stage = max(stages, key=lambda name: stages[name], default=None)
    meanwhile = f", most of it in the driver's stage <code>{text(stage)}</code>" if stage and stages[stage] else ""
    share = (end - start) / (timeline.end - timeline.start)
    if any("resumed_tokens" in span.args for span in timeline.spans):
        advice = "<code>verl-fuse advise</code> needs a run whose requests did not move, such as one in observe mode."
    else:
        command = f"verl-fuse advise {shlex.quote(run_dir)}"
        advice = f"<code>{text(command)}</code> tells which features would have shortened the run's steps."
    return (
        f"<p><b>Largest idle:</b> {text(row.label)}, {seconds(end - start)} ({percent(share)} of the step) from "
        f"{seconds(start)} on{meanwhile}. {advice}</p>"
    )


def _roles(table: IdleTable) -> str:
    lines = ""
    for kind in ("device", REPLICA, RANK):
        if idle := [row.idle_fraction for row in table.of(kind)]:
            cells = (len(idle), percent(table.idle_fraction(kind)), percent(min(idle)), percent(max(idle)))
            lines += f"<tr><th {hint(kind)}>{kind}s</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return lines


def _stages(summary: StepSummary) -> str:
    lines = []
    for name, value in summary.stages:
        share = value / summary.seconds if summary.seconds else 0.0
        bar = f'<i class="bar" style="width:{share * 100:.1f}%;background:var(--{work_of(name, "stage")})"></i>'
        lines.append(
            f"<tr><th>{text(name)}</th><td>{seconds(value)}</td><td>{percent(share)}</td><td class=wide>{bar}</td></tr>"
        )
    return "".join(lines)


def _planned(summary: StepSummary) -> str:
    """Return the section about a plan's forecast; nothing where no plan was carried out."""
    if not summary.planned:
        return ""
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{seconds(planned)}</td><td>{seconds(took)}</td>"
        f"<td>{took / planned:.2f}</td></tr>"
        for name, planned, took in summary.planned
        if planned > 0
    )
    head = "<tr><th>stage</th><th>planned</th><th>measured</th><th>ratio</th></tr>"
    return f"<h2>Planned and measured</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _tracks(rows: Iterable[IdleRow]) -> str:
    """Return the rows of the table of tracks: neighbours of one role with the same figures share a row."""

    def figures(row: IdleRow) -> tuple[str, ...]:
        cells = seconds(row.busy), percent(row.idle_fraction), str(row.spans), f"{row.concurrency:.1f}"
        return row.role, *cells, f"{(1 - row.idle_fraction) * 100:.0f}%"

    lines = []
    for (_, *cells, share), alike in groupby(rows, figures):
        bar = f'<i class="bar" style="width:{share}"></i>'
        said = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><th>{text(label([row.track for row in alike]))}</th>{said}<td class=wide>{bar}</td></tr>")
    return "".join(lines)
