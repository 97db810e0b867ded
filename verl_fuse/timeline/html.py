"""Fills the templates under assets/ safely.

Invariants (tests/unit/timeline/test_pages.py):
- text from a run (names of runs, tracks, spans, arguments) never becomes markup or script;
- a page needs no network and no second file.
"""

import html
import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from verl_fuse.spec.timeline import (
    FUSED_UPDATE,
    GENERATION,
    INFERENCE_STAGES,
    REWARD,
    TRAIN_STAGES,
    UPDATE_WEIGHTS,
    Span,
)

# The work of each of verl's stages, which decides the stage's colour.
STAGE_WORK = {
    GENERATION: "generate",
    REWARD: "reward",
    **dict.fromkeys(INFERENCE_STAGES, "inference"),
    **dict.fromkeys((*TRAIN_STAGES, FUSED_UPDATE), "train"),
    UPDATE_WEIGHTS: "sync",
}
COLOURS = {
    "generate": "#3f87c9",
    "reward": "#c7a82c",
    "inference": "#1f9e79",
    "train": "#e07b28",
    "sync": "#8e63bd",
    "stage": "#8993a1",
    "wait": "#c3c9d2",
    "other": "#b5728f",
    "moved": "#d1495b",
}
# A request that continues another replica's request, and the idle time of a device.
RESUMED, IDLE = "moved", "idle"


def text(value: object) -> str:
    """Escape text for element content and quoted attributes."""
    return html.escape(str(value), quote=True)


def packed(data: Any) -> str:
    """Return JSON, deflated, in base64, which cannot end its script element; assets/gantt.js reads it."""
    return b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()


def fill(template: str, markup: Mapping[str, str]) -> str:
    """Replace each {{name}} of assets/`template` by `markup[name]`, in one pass: inserted text is not scanned again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: markup[match[1]], asset(template))


def head(title: str, *, scripted: bool = False) -> str:
    """Return the beginning of a page up to its own styles. It loads nothing; `scripted`: it runs scripts of its own."""
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if scripted else "")
    palette = "".join(f"--{name}: {colour}; " for name, colour in COLOURS.items())
    style = fill("style.css", {"palette": palette})
    return fill("head.html", {"policy": policy, "title": text(title), "style": style})


def seconds(value: float | None) -> str:
    """Return a duration in a readable unit."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def percent(value: float | None) -> str:
    """Return a share in whole per cent."""
    return "–" if value is None else f"{value * 100:.0f} %"


def work_of(stage: str, category: str) -> str:
    """Return the category whose colour a span of the driver's track gets."""
    return STAGE_WORK.get(stage, category) if category == "stage" else category


def colour_of(span: Span) -> str:
    """Return the colour of a span, by name."""
    return RESUMED if "resumed_tokens" in span.args else work_of(span.name, span.category)


def legend(names: Iterable[str], labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return list items of colours, each with its name or its label."""
    return "".join(f'<li><i style="background:var(--{name})"></i>{labels.get(name, name)}</li>' for name in names)


def stage_legend(stages: Iterable[str], other: str = "other stages", beside: Iterable[str] = ()) -> str:
    """Return list items of the colours that stages of the driver have, and of colours `beside` them."""
    used = {work_of(stage, "stage") for stage in stages}
    names = dict.fromkeys((*STAGE_WORK.values(), "stage"))
    return legend([*(name for name in names if name in used), *beside], {"stage": other})


def stacked(stages: Iterable[tuple[str, float]], scale: float) -> str:
    """Return a bar of stages, each so many per cent wide a second."""
    parts = "".join(
        f'<i style="width:{value * scale:.2f}%;background:var(--{work_of(stage, "stage")})" title="{text(stage)}: '
        f'{seconds(value)}"></i>'
        for stage, value in stages
    )
    return f"<div class=stack>{parts}</div>"


def asset(name: str) -> str:
    """Return the text of one file under assets/."""
    return files("verl_fuse.timeline").joinpath("assets", name).read_text(encoding="utf-8")
