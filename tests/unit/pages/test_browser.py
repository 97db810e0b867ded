"""The pages in a headless Chromium: no error, no sideways scroll, light and dark; the chart's keys, wheel and folds."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from made_runs import made
from problems import two_ranks
from synthetic import synthetic_timeline
from window import SCHEMES, WIDTHS, faults, ground, show

from verl_fuse.compare.comparison import compare
from verl_fuse.compare.page import page
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.render import write_picture
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.files import record_step
from verl_fuse.timeline.strategies_page import Strategy, strategies_page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of page."""
    folder = tmp_path_factory.mktemp("pages")
    for step in (1, 2, 3):
        record_step(folder / "run", synthetic_timeline(step=step))
    record_step(folder / "large", synthetic_timeline(replicas=64, ranks=256, requests=512))
    told = {"prompt": "p", "prompt_tokens": 9, "response_tokens": 30, "stop_reason": "aborted"}
    rest = {"prompt": "p", "prompt_tokens": 39, "response_tokens": 8, "resumed_tokens": 30}
    parts = (Span("r", "replica 0", "generate", 0.0, 1.0, told), Span("r", "replica 1", "generate", 1.5, 2.0, rest))
    record_step(folder / "moved", Timeline("moved", 1, 0.0, 2.0, parts))
    strategies = [
        Strategy("stock", synthetic_timeline(), 12.34, 1.0, 0.25),
        Strategy("streaming", synthetic_timeline(), 12.34, 1.0, 0.25, notes=("nothing to do",)),
        Strategy("interstage", synthetic_timeline(seed=1), 5.6, 2.2, 0.125, notes=("tail moved",)),
    ]
    (folder / "strategies.html").write_text(strategies_page("ppo", "Verdict: on.", "Simulated.", strategies))
    (folder / "compare.html").write_text(page(compare(made(1), made(2, fused=True, seconds=4.0), 1), []))
    write_picture(solve(two_ranks(4, memory_limit=3.0), "back-to-back", Budget(1)), folder / "schedule.html")
    return folder


NAMES = (
    "run/timeline.html", "run/timeline/step_000002.html", "moved/timeline/step_000001.html",
    "large/timeline/step_000003.html", "strategies.html",
    "compare.html", "schedule.html",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_and_has_no_error(browser, pages, name):
    grounds = set()
    for width in WIDTHS:
        for scheme in SCHEMES:
            show(browser, pages / name, width, scheme)
            assert faults(browser) == [], (name, width, scheme)
            grounds.add(ground(browser))
    assert len(grounds) == len(SCHEMES)


def test_the_chart_is_moved_by_keys_and_wheel(browser, pages):
    show(browser, pages / "run/timeline/step_000002.html")
    canvas = browser.find_element("id", "canvas")
    whole = browser.execute_script("return view")
    canvas.send_keys("+")
    zoomed = browser.execute_script("return view")
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * (whole[1] - whole[0]))
    canvas.send_keys("\ue014")
    assert browser.execute_script("return view")[0] > zoomed[0]
    canvas.send_keys("0")
    assert browser.execute_script("return view") == whole
    wheel = "new WheelEvent('wheel', {deltaY: -100, ctrlKey: true, clientX: 600, clientY: 300, cancelable: true})"
    browser.execute_script(f"canvas.dispatchEvent({wheel})")
    left = browser.execute_script("return view")
    assert left[1] - left[0] < whole[1] - whole[0]


def test_two_fingers_zoom_and_one_pans(browser, pages):
    show(browser, pages / "run/timeline/step_000002.html")
    touch = """
    const [name, id, x] = arguments, box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent(name, {pointerId: id, pointerType: "touch", clientX: box.left + x,
      clientY: box.top + 60, bubbles: true}));
    """
    whole = browser.execute_script("return view")
    for name, finger, x in (("pointerdown", 1, 500), ("pointerdown", 2, 600), ("pointermove", 2, 900)):
        browser.execute_script(touch, name, finger, x)
    zoomed = browser.execute_script("return view")
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 4)
    for name, finger, x in (("pointerup", 2, 900), ("pointermove", 1, 450)):
        browser.execute_script(touch, name, finger, x)
    assert browser.execute_script("return view")[0] > zoomed[0]


def test_many_devices_fit_on_one_screen_and_their_ranks_unfold(browser, pages):
    show(browser, pages / "large/timeline/step_000003.html")
    rows = "return shown.filter((track) => track.role === arguments[0]).length"
    assert browser.execute_script(rows, "rank") == 0
    first, last = browser.execute_script(
        "const rows = shown.filter((track) => track.role === 'device');"
        "return [rows[0].top, rows[rows.length - 1].top + rows[rows.length - 1].height]"
    )
    assert last - first < 720
    canvas = browser.find_element("id", "canvas")
    for ranks in (256, 0):
        canvas.send_keys("f")
        assert browser.execute_script(rows, "rank") == ranks
    # A click on the row's name unfolds that row only.
    name = "shown.find((track) => track.role === 'fold' && track.group.role === 'rank')"
    browser.execute_script(
        f"const row = {name}, box = canvas.getBoundingClientRect();"
        "chart.scrollTop = row.top - 60;"
        "canvas.dispatchEvent(new PointerEvent('pointerdown', {pointerType: 'mouse', clientX: box.left + 20,"
        "clientY: box.top + row.top - chart.scrollTop + row.height / 2, bubbles: true}));"
    )
    assert browser.execute_script("return groups.filter((group) => folds(group) && group.open).map((g) => g.role)") == [
        "rank"
    ]


def test_a_moved_request_has_an_arrow(browser, pages):
    show(browser, pages / "moved/timeline/step_000001.html")
    # The colour half way from the end of the part to the start of its rest, between the rows of the two replicas.
    pixel = """
        const [from, row, end, to, other, begin] = window.move ??= moves[0];
        const [upper, lower] = [homes.get(tracks[from]), homes.get(tracks[to])], ratio = devicePixelRatio;
        const y = (upper.top + upper.height / 2 + lower.top + lower.height / 2) / 2;
        const spot = context.getImageData((x((end + begin) / 2) - 8) * ratio, y * ratio, 16 * ratio, 1).data;
        return [...spot.keys()].filter((at) => at % 4 === 0).some((at) => spot[at] > 190 && spot[at + 1] < 140);
    """
    assert browser.execute_script(pixel)
    browser.execute_script("moves.length = 0; draw()")
    assert not browser.execute_script(pixel)


def test_the_clock_is_utc(browser, pages):
    show(browser, pages / "run/timeline/step_000001.html")
    start = browser.execute_script("return start")
    assert (
        browser.execute_script("return clock(1.5, true)")
        == f"{datetime.fromtimestamp(start + 1.5, UTC):%H:%M:%S.%f}"[:10]
    )


def test_every_step_is_reached_from_its_neighbour(browser, pages):
    show(browser, pages / "run/timeline/step_000001.html")
    for step in (2, 3):
        browser.find_element("css selector", "nav a[rel=next]").click()
        assert browser.find_element("tag name", "h1").text == f"Step {step}"
    assert not browser.find_elements("css selector", "nav a[rel=next]")


def test_one_cursor_is_over_all_curves(browser, pages):
    show(browser, pages / "compare.html")
    said = "return [...document.querySelectorAll('output')].map((readout) => readout.textContent)"
    browser.execute_script("""
        const point = document.querySelector('circle.base[data-step="7"]').getBoundingClientRect();
        const there = {clientX: point.left + point.width / 2, clientY: point.top, bubbles: true};
        document.querySelector("svg.curve").dispatchEvent(new PointerEvent("pointermove", there));
    """)
    readouts = browser.execute_script(said)
    assert len(readouts) == 3
    assert all(readout.startswith("step 7: base ") and ", fused " in readout for readout in readouts)
    assert len(browser.find_elements("css selector", ".cursor")) == 2 * len(readouts)
    browser.execute_script("document.querySelector('svg.curve').dispatchEvent(new PointerEvent('pointerleave'))")
    assert browser.execute_script(said) == [""] * 3
    assert not browser.find_elements("css selector", ".cursor")


def test_a_point_is_as_high_as_its_value(browser, pages):
    show(browser, pages / "compare.html")
    drawn = """
        const points = drawings[0].points.toSorted((one, other) => one.value - other.value);
        return [points.length, ...[0, -1].map((index) => points.at(index).circle.cy.baseVal.value)];
    """
    assert browser.execute_script(drawn) == [40, 160, 8]


def test_every_op_of_a_schedule_is_drawn_at_its_time(browser, pages):
    show(browser, pages / "schedule.html")
    drawn = """
        const shares = (op) => [op.x, op.width].map((length) => length.baseVal.valueInSpecifiedUnits.toFixed(2));
        return [...document.querySelectorAll(".op")].map((op) => [op.textContent, ...shares(op)].join(" "))
    """
    found = solve(two_ranks(4, memory_limit=3.0), "back-to-back", Budget(1))
    assert sorted(browser.execute_script(drawn)) == sorted(
        f"{op.token} {op.start:g} to {op.end:g} units of time "
        f"{100 * op.start / found.makespan:.2f} {100 * (op.end - op.start) / found.makespan:.2f}"
        for op in found.ops
    )


def test_curves_are_drawn_over_the_time_that_steps_took(browser, pages):
    show(browser, pages / "compare.html")
    last = """
        return ["base", "fused"].map((run) => [...document.querySelectorAll(`svg.curve circle.${run}`)])
          .map((circles) => Number(circles.find((circle) => circle.dataset.step === "20").getAttribute("cx")))
    """
    base, fused = browser.execute_script(last)
    assert base == fused
    browser.find_element("id", "by-time").click()
    base, fused = browser.execute_script(last)
    # A fused step takes about four fifths of a base step.
    assert base - 70 == pytest.approx((fused - 70) * 5 / 4, rel=0.1)
    assert faults(browser) == []


@pytest.mark.parametrize("name", NAMES)
def test_words_of_drawings_are_large_enough_to_read(browser, pages, name):
    small = """
    return [...document.querySelectorAll('svg text')].filter((word) => word.getClientRects().length)
      .map((word) => parseFloat(getComputedStyle(word).fontSize) * word.getScreenCTM().a)
      .filter((size) => size < arguments[0])
    """
    for width in WIDTHS:
        show(browser, pages / name, width)
        assert browser.execute_script(small, 9) == []
