"""Writes RUN_DIR/strategies.html: simulated strategies side by side, on one time scale.

Invariants (tests/unit/timeline/test_pages.py):
- the page needs no second file and no script, and says that nothing on it was run;
- every strategy is in the table, those without effect folded; the pictures are of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.html import IDLE, fill, head, percent, seconds, stacked, stage_legend, text
from verl_fuse.timeline.picture import picture
from verl_fuse.timeline.summary import StepSummary, summarize
from verl_fuse.timeline.terms import hint

# A strategy whose time a step and whose idle share are within this share of the baseline's has no effect.
LITTLE = 0.01
# Features are compared with this strategy, which all of them include; where it was not simulated, with the first.
BASELINE = "observe"


@dataclass(frozen=True)
class Strategy:
    """A simulated strategy: one step of it; the seconds of a step, the speed-up over stock and the idle share over all
    its steps; what it decided; the address of the step's page, empty where there is none; whether a policy of it
    failed, which is shown whatever it changes."""

    name: str
    example: Timeline
    seconds: float
    speedup: float
    idle: float
    notes: tuple[str, ...] = ()
    page: str = ""
    faulty: bool = False


def strategies_page(title: str, verdict: str, origin: str, strategies: Sequence[Strategy]) -> str:
    """Write the page. `strategies`: stock first. `verdict` is the advice, empty where there is none; `origin` tells
    where the numbers come from. Both are whole sentences."""
    summaries = {one.name: summarize(one.example) for one in strategies}
    longest = max(summary.seconds for summary in summaries.values())
    shown, folded = without_effect(strategies)
    return fill(
        "strategies.html",
        {
            "head": head(title),
            "title": text(title),
            "verdict": f"<h2>{text(verdict)}</h2>" if verdict else "",
            "origin": text(origin),
            "legend": stage_legend((name for one in summaries.values() for name, _ in one.stages), beside=[IDLE]),
            "strategies": _table(shown, summaries, longest),
            "folded": _folded(folded, summaries, longest),
            "picture": picture([(one.name, one.example) for one in shown]),
        },
    )


def without_effect(strategies: Sequence[Strategy]) -> tuple[list[Strategy], list[Strategy]]:
    """Return the strategies that change something, stock and the baseline first, and all others."""
    base = next((one for one in strategies if one.name == BASELINE), strategies[0])

    def changes(one: Strategy) -> bool:
        alike = abs(one.seconds / base.seconds - 1) < LITTLE and abs(one.idle - base.idle) < LITTLE
        return one in (strategies[0], base) or one.faulty or not alike

    return [one for one in strategies if changes(one)], [one for one in strategies if not changes(one)]


def _folded(folded: Sequence[Strategy], summaries: dict[str, StepSummary], longest: float) -> str:
    if not folded:
        return ""
    names = ", ".join(one.name for one in folded)
    return f"<details><summary>Below 1 %: {text(names)}</summary>{_table(folded, summaries, longest)}</details>"


def _table(strategies: Sequence[Strategy], summaries: dict[str, StepSummary], longest: float) -> str:
    head = (
        f'<tr><th></th><th>step</th><th title="Seconds of a stock step over seconds of this one.">speed-up</th>'
        f"<th {hint('idle')}>idle</th><th {hint('long tail')}>long tail</th><th></th><th></th></tr>"
    )
    rows = "".join(_row(one, summaries[one.name], longest) for one in strategies)
    notes = "".join(f"<li>{text(one.name)}: {text(note)}</li>" for one in strategies for note in one.notes)
    listed = f'<ul class="notes">{notes}</ul>' if notes else ""
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>{listed}"


def _row(one: Strategy, summary: StepSummary, longest: float) -> str:
    bar = stacked(summary.stages, 100 / longest)
    link = f'<a href="{text(one.page)}">chart</a>' if one.page else ""
    cells = (seconds(one.seconds), f"{one.speedup:.2f}", percent(one.idle), percent(summary.long_tail_fraction))
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{text(one.name)}</th>{numbers}<td class=wide>{bar}</td><td>{link}</td></tr>"
