"""The HTML pages: complete, self-contained, safe."""

import json
import re
import zlib
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

import pytest
from synthetic import START, synthetic_timeline

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.html import COLOURS, fill, seconds
from verl_fuse.timeline.index_page import index_page, trend
from verl_fuse.timeline.step_page import linked, step_page
from verl_fuse.timeline.strategies_page import Strategy, strategies_page, without_effect
from verl_fuse.timeline.summary import summarize
from verl_fuse.timeline.terms import TERMS

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{data}}\u2028"


class Page(HTMLParser):
    """Tags with their attributes, text outside scripts, and the content of each script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.shown = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.shown += data


def step_of(timeline: Timeline) -> str:
    return step_page(timeline, summarize(timeline))


def data_of(page: str) -> dict[str, Any]:
    """What the script of a step's page draws."""
    return json.loads(zlib.decompress(b64decode(Page(page).scripts[0])))


def index_of(*timelines: Timeline) -> str:
    links = {"step_000003.html": "timeline/step_000003.html"}
    return index_page(timelines[0].run, [summarize(timeline) for timeline in timelines], links)


def evil_timeline() -> Timeline:
    requests = [Span(EVIL, f"replica {i}{EVIL}", "generate", i, i + 1, {EVIL: EVIL}) for i in range(2)]
    return Timeline(EVIL, 3, 0.0, 5.0, (*requests, Span(EVIL, "step", "stage", 0.0, 2.0)))


def test_every_span_is_in_the_page_once():
    timeline = synthetic_timeline()
    data = data_of(step_of(timeline))
    drawn = [
        (track["name"], name, category, start, end, args)
        for track in data["tracks"]
        for name, category, _, start, end, _, args in track["spans"]
    ]
    expected = [
        (s.track, s.name, s.category, round(s.start - START, 4), round(s.end - START, 4), dict(s.args))
        for s in timeline.spans
    ]
    assert sorted(drawn, key=str) == sorted(expected, key=str)
    assert all(span[5] < track["rows"] for track in data["tracks"] for span in track["spans"])
    assert {span[2] for track in data["tracks"] for span in track["spans"]} <= set(COLOURS)


def test_the_rest_of_a_moved_request_has_a_colour_of_its_own():
    args = {"prompt_tokens": 9, "response_tokens": 30}
    parts = (
        Span("request", "replica 0", "generate", 0.0, 1.0, args),
        Span("request", "replica 1", "generate", 1.0, 2.0, {**args, "resumed_tokens": 4}),
    )
    data = data_of(step_of(Timeline("run", 1, 0.0, 2.0, parts)))
    assert [span[2] for track in data["tracks"] for span in track["spans"]] == ["generate", "moved"]


def test_a_stage_that_was_planned_to_take_no_time_has_no_ratio():
    stages = (
        Span("gen", "step", "stage", 0.0, 4.0, {"planned_seconds": 2.0}),
        Span("values", "step", "stage", 4.0, 5.0, {"planned_seconds": 0.0}),
    )
    shown = step_of(Timeline("run", 1, 0.0, 5.0, stages)).partition("Planned and measured")[2].partition("</table>")[0]
    assert "<th>gen</th><td>2.0 s</td><td>4.0 s</td><td>2.00</td>" in shown
    assert "values" not in shown


@pytest.mark.parametrize("page", [step_of(synthetic_timeline()), index_of(synthetic_timeline())], ids=["step", "index"])
def test_a_page_needs_nothing_but_itself(page: str):
    parsed = Page(page)
    loading = [(tag, attrs) for tag, attrs in parsed.tags if {"src", "srcset", "data", "poster", "action"} & set(attrs)]
    assert loading == []
    assert not {tag for tag, _ in parsed.tags} & {"link", "iframe", "img", "object", "embed", "base", "form"}
    assert all(not attrs["href"].startswith(("http", "//")) for _, attrs in parsed.tags if attrs.get("href"))  # type: ignore[union-attr]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon", page)
    policy = next(
        attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize("make", [step_of, index_of], ids=["step", "index"])
def test_names_from_a_run_stay_text(make):
    harmless, evil = Page(make(synthetic_timeline())), Page(make(evil_timeline()))
    assert {tag for tag, _ in evil.tags} <= {tag for tag, _ in harmless.tags}
    assert len(evil.scripts) == len(harmless.scripts)
    assert not any(key.startswith("on") for _, attrs in evil.tags for key in attrs)
    assert EVIL in evil.shown


def test_names_reach_the_script_unchanged():
    data = data_of(step_of(evil_timeline()))
    requests = [span for track in data["tracks"] for span in track["spans"] if span[1] == "generate"]
    assert [(span[0], span[6]) for span in requests] == [(EVIL, {EVIL: EVIL})] * 2


def test_figures_and_tables_stand_without_javascript():
    shown = Page(step_of(synthetic_timeline())).shown
    for text in (
        "Step 3",
        "ppo-cpu synthetic",
        "64 requests",
        "update_critic",
        "1.7 s",
        "device 0",
        "replica 1",
        "rank 1",
    ):
        assert text in shown


def test_what_was_planned_stands_beside_what_was_measured():
    said = Span("gen", "step", "stage", 0.0, 6.0, {"planned_seconds": 4.0})
    shown = step_of(Timeline("run", 1, 0.0, 8.0, (said,)))
    assert "<h2>Planned and measured</h2>" in shown
    assert "<tr><th>gen</th><td>4.0 s</td><td>6.0 s</td><td>1.50</td></tr>" in shown
    assert "Planned and measured" not in step_of(synthetic_timeline())


def test_the_legend_names_the_categories_used_and_no_others():
    spans = (Span("ref", "step", "stage", 0.0, 1.0), Span("wait", "rank 0", "wait", 0.0, 1.0))
    page = step_of(Timeline("run", 1, 0.0, 1.0, spans))
    assert re.findall(r"</i>(\w+)</li>", page) == ["inference", "wait", "idle"]


def test_the_largest_idle_is_said_in_a_sentence_with_the_command_that_advises():
    spans = (
        Span("gen", "step", "stage", 0.0, 4.0),
        Span("update_actor", "step", "stage", 4.0, 10.0),
        Span("request", "replica 0", "generate", 0.0, 1.0),
        Span("update_actor", "rank 0", "train", 5.0, 10.0),
    )
    timeline = Timeline("run", 1, 0.0, 10.0, spans)
    shown = Page(step_page(timeline, summarize(timeline), "my runs/ppo")).shown
    assert (
        "Largest idle: device 0, 4.0 s (40 % of the step) from 1.0 s on, most of it in the driver's stage gen. "
        "verl-fuse advise 'my runs/ppo' tells"
    ) in " ".join(shown.split())
    assert "Largest idle" not in step_of(Timeline("run", 1, 0.0, 1.0, ()))
    moved = Span("request", "replica 0", "generate", 2.0, 3.0, {"resumed_tokens": 4})
    shown = Page(step_of(Timeline("run", 1, 0.0, 10.0, (*spans, moved)))).shown
    assert "verl-fuse advise needs a run whose requests did not move" in shown
    assert "verl-fuse advise RUN_DIR" not in shown


def test_a_moved_request_has_an_arrow_and_a_recorded_step_the_wall_clock():
    part = {"prompt": "p", "prompt_tokens": 9, "response_tokens": 30, "stop_reason": "aborted"}
    rest = {"prompt": "p", "prompt_tokens": 39, "response_tokens": 8, "resumed_tokens": 30}
    spans = (
        Span("request", "replica 0", "generate", 0.0, 1.0, part),
        Span("request", "replica 1", "generate", 1.5, 2.0, rest),
    )
    data = data_of(step_of(Timeline("run", 1, 0.0, 2.0, spans)))
    assert data["moves"] == [[0, 0, 1.0, 1, 0, 1.5]]
    assert data["start"] is None
    recorded = data_of(step_of(synthetic_timeline()))
    assert (recorded["moves"], recorded["start"]) == ([], START)


def test_neighbours_with_the_same_figures_share_a_row_of_the_table():
    spans = [Span("update_actor", f"rank {rank}", "train", 0.0, 4.0 if rank < 8 else 8.0) for rank in range(12)]
    table = step_of(Timeline("run", 1, 0.0, 10.0, tuple(spans))).partition("Each track")[2].partition("</table>")[0]
    assert re.findall(r"<tr><th>([^<]+)</th><td>([^<]+)</td><td>([^<]+)</td>", table) == [
        ("rank 0 to 7", "4.0 s", "60 %"),
        ("rank 8 to 11", "8.0 s", "20 %"),
    ]


def test_a_page_of_a_step_stays_small():
    timeline = synthetic_timeline(replicas=8, ranks=8, requests=256, slots=32)
    assert len(step_of(timeline)) < 50_000


def test_many_tracks_start_folded():
    assert "<details open" in step_of(synthetic_timeline())
    assert "<details open" not in step_of(synthetic_timeline(replicas=64, ranks=64, requests=128))


def test_a_step_without_spans_has_a_page():
    assert "–" in Page(step_of(Timeline("run", 1, 0.0, 1.0, ()))).shown


def test_the_index_lists_steps_newest_first_and_links_only_what_exists():
    page = Page(index_of(synthetic_timeline(step=2), synthetic_timeline(step=3)))
    assert [attrs["href"] for tag, attrs in page.tags if tag == "a"] == ["timeline/step_000003.html"]
    assert re.findall(r"<tr><th>(\d+)", index_of(synthetic_timeline(step=2), synthetic_timeline(step=3))) == ["3", "2"]
    assert "2 steps, " in page.shown


def test_filled_in_text_is_not_filled_in_again():
    names = re.findall(r"\{\{(\w+)\}\}", (fill("step.html", _Echo())))
    assert "data" in names


class _Echo(dict):
    def __missing__(self, key: str) -> str:
        return "{{" + key + "}}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0126, "13 ms"), (1.0, "1.0 s"), (99.94, "99.9 s"), (119.6, "120 s"), (125, "2 min 05 s"),
     (3725, "62 min 05 s")],
)  # fmt: skip
def test_durations_come_in_the_unit_people_use(value: float | None, shown: str):
    assert seconds(value) == shown


def strategies() -> list[Strategy]:
    """Stock, observe mode, a strategy that changes nothing, and one that does."""
    return [
        Strategy("stock", synthetic_timeline(), 12.34, 1.0, 0.25),
        Strategy("observe", synthetic_timeline(), 11.2, 1.1, 0.2),
        Strategy("idle<b>", synthetic_timeline(), 11.2, 1.1, 0.2, notes=("changes nothing",)),
        Strategy(
            "all", synthetic_timeline(seed=2), 5.6, 2.2, 0.125, notes=(EVIL,), page="all/timeline/step_000001.html"
        ),
    ]


def test_strategies_stand_side_by_side_in_a_page_without_script():
    page = strategies_page("ppo", "Verdict: switch on all.", "Simulated: nothing was run.", strategies())
    parsed = Page(page)
    assert not parsed.scripts
    assert not {tag for tag, _ in parsed.tags} & {"link", "iframe", "img", "object", "embed", "base", "form"}
    assert [attrs["href"] for tag, attrs in parsed.tags if tag == "a"] == ["all/timeline/step_000001.html"]
    assert all(text in parsed.shown for text in ("stock", "all", "speed-up", "5.6 s", "2.20", "12 %", EVIL))


def test_the_page_of_strategies_opens_with_verdict_origin_and_legend():
    page = strategies_page("ppo", "Verdict: switch on all.", "Simulated: nothing was run.", strategies())
    order = [page.index(text) for text in ("Verdict: switch", "Simulated: nothing", 'class="legend"', "<th>stock</th>")]
    assert order == sorted(order)
    assert re.findall(r"</i>([a-z ]+)</li>", page)[:3] == ["generate", "inference", "train"]
    assert page.partition("</ul>")[0].endswith("</i>idle</li>")


def test_strategies_without_effect_are_folded_and_not_drawn():
    shown, folded = without_effect(strategies())
    assert ([one.name for one in shown], [one.name for one in folded]) == (["stock", "observe", "all"], ["idle<b>"])
    page = strategies_page("ppo", "", "", strategies())
    before, inside = page.split("<details>")
    assert "<th>idle&lt;b&gt;</th>" not in before
    assert "<th>idle&lt;b&gt;</th>" in inside.partition("</details>")[0]
    assert "changes nothing" in inside.partition("</details>")[0]
    assert re.findall('<tspan class="name">([^<]+)</tspan>', page) == ["stock", "observe", "all"]
    slower = Strategy("slower", synthetic_timeline(), 11.5, 1.07, 0.2)
    assert without_effect([*strategies(), slower])[0][-1] == slower
    assert "<details>" not in strategies_page("ppo", "", "", strategies()[:2])


def test_the_trend_has_every_stage_of_every_step():
    summaries = [summarize(synthetic_timeline(step=step)) for step in (1, 2, 3)]
    stages = sum(len(summary.stages) for summary in summaries)
    assert trend(summaries).count("<rect") == stages
    assert "step 2, update_actor: 2.3 s" in trend(summaries)


def test_a_page_links_its_neighbours():
    page = linked(step_of(synthetic_timeline()), "step_000002.html", None)
    found = [attrs.get("href") for tag, attrs in Page(page).tags if tag == "a"]
    assert found == ["step_000002.html", "../timeline.html"]
    assert linked(linked(page, None, "x.html"), "step_000002.html", None) == page


def test_the_words_on_a_page_are_explained_there():
    shown = Page(step_of(synthetic_timeline())).shown
    assert all(said in shown for said in TERMS.values())
