"""Draws steps side by side as one SVG: the work of every device, on one time scale. The SVG needs no script and no font
file.

Invariant (tests/unit/timeline/test_devices.py): text from a run never becomes markup; idle time is drawn, and named.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.devices import device_rows
from verl_fuse.timeline.html import COLOURS, IDLE, percent, seconds, text
from verl_fuse.timeline.summary import summarize

_WIDTH, _LEFT, _RIGHT, _HEAD, _AXIS = 960, 132, 16, 30, 26
# Heights of a device's row, by the number of rows of the step.
_ROW, _THIN, _THIN_FROM = 18, 6, 24
_STYLE = (
    "text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:var(--ink,#1c2430)}"
    ".soft{fill:var(--soft,#667181)}.name{font-weight:600;font-size:13px}.tick{stroke:var(--line,#d5dae1)}"
    f".{IDLE}{{stroke:url(#idle)}}" + "".join(f".{name}{{stroke:{colour}}}" for name, colour in COLOURS.items())
)


def picture(steps: Sequence[tuple[str, Timeline]], ground: str | None = None) -> str:
    """Return one block of rows per (title, step); all have the time scale of the longest step. `ground`: a colour
    behind all rows. All stretches of one kind in a step are one path, whose line is as thick as a row."""
    longest = max(timeline.end - timeline.start for _, timeline in steps)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts, top, used = [], 0.0, dict[str, None]()
    for title, timeline in steps:
        rows = device_rows(timeline)
        height = _ROW if len(rows) <= _THIN_FROM else _THIN
        lines = defaultdict[str, str](str)
        parts.append(_head(title, timeline, top + 18))
        for index, row in enumerate(rows):
            y = top + _HEAD + index * (height + 2) + height / 2
            if height == _ROW or index % 8 == 0:
                parts.append(f'<text y="{y + 4:g}">{text(row.label)}</text>')
            for category, start, end in row.stretches:
                x, width = _LEFT + start * scale, max((end - start) * scale, 0.3)
                lines[category] += f"M{round(x, 1):g} {y:g}h{round(width, 1):g}"
        used |= dict.fromkeys(lines)
        parts += (f'<path class="{name}" stroke-width="{height}" d="{line}"/>' for name, line in lines.items())
        top += _HEAD + len(rows) * (height + 2) + 8
    parts += _axis(longest, scale, top)
    parts += _legend([name for name in (*COLOURS, IDLE) if name in used], top + _AXIS + 12)
    full = top + _AXIS + 24
    back = f'<rect width="{_WIDTH}" height="{full:g}" fill="{ground}"/>' if ground else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {full:g}" role="img" '
        f'aria-label="{text(", ".join(title for title, _ in steps))}: what every device does">'
        f'<style>{_STYLE}</style><defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#d9a3a333"/>'
        '<rect width="2" height="6" fill="#c94f4f66"/></pattern></defs>'
        f"{back}{''.join(parts)}</svg>\n"
    )


def _head(title: str, timeline: Timeline, y: float) -> str:
    summary = summarize(timeline)
    idle = "" if summary.idle_overall is None else f", devices {percent(summary.idle_overall)} idle"
    return (
        f'<text y="{y:g}"><tspan class="name">{text(title)}</tspan>'
        f'<tspan class="soft" dx="10">{seconds(summary.seconds)}{idle}</tspan></text>'
    )


def _axis(longest: float, scale: float, top: float) -> list[str]:
    about = longest / 8
    power = 10 ** math.floor(math.log10(about))
    step = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= about)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    marks = [index * step for index in range(int(longest / step + 1e-9) + 1)]
    return [
        f'<path class="tick" d="M{_LEFT + at * scale:.1f} {top - 4:g}v6"/>'
        f'<text class="soft" text-anchor="middle" x="{_LEFT + at * scale:.1f}" y="{top + 16:g}">{at:.{digits}f} s'
        "</text>"
        for at in marks
    ]


def _legend(names: Sequence[str], y: float) -> list[str]:
    return [
        f'<path class="{name}" stroke-width="12" d="M{_LEFT + 112 * index} {y - 4:g}h12"/>'
        f'<text x="{_LEFT + 112 * index + 17}" y="{y:g}">{name}</text>'
        for index, name in enumerate(names)
    ]
