"""The page of a comparison: complete, self-contained, safe."""

import re
from dataclasses import replace
from html import unescape

from made_runs import made

from verl_fuse.compare.comparison import compare
from verl_fuse.compare.page import page
from verl_fuse.compare.run import RunMetrics
from verl_fuse.compare.verdict import difference_text, interval_text, verdict

EVIL = "</style><script>alert(1)</script>\"'&{{title}}"


def test_every_figure_is_in_the_page():
    found = compare(made(1, "stock", steps=12), made(1, "fused", fused=True, seconds=4.0))
    text = unescape(page(found, ["a remark"]))
    assert verdict(found)[1:] in text
    assert "a remark" in text
    assert "times of 11 steps compared, 2 to 12; the first step of each run left out (--warm-up 1)" in text
    for stage in (*found.stages, found.whole):
        assert f"<th>{stage.name}</th>" in text
        assert interval_text(stage.difference, 3, "+") in text
        assert f"<td>{stage.base:.3f} s</td><td>{stage.fused:.3f} s</td>" in text
    for curve in found.curves:
        assert curve.metric in text
        assert difference_text(curve.difference) in text
        assert re.search(f'class="base" data-values="[^"]*,12 {curve.base[12]:.6g}"', text)


def test_the_page_loads_nothing_and_runs_no_script_but_its_own():
    text = page(compare(made(1), made(1, fused=True)), [])
    assert "default-src 'none'" in text
    assert not re.search(r"<link|<img|\bsrc=|url\(|https?://|fetch\(|import\(", text)
    assert text.count("<script") == 1
    assert "{{" not in text


def test_the_page_of_a_long_run_stays_small():
    found = compare(made(1, steps=200), made(1, fused=True, steps=200))
    assert len(page(found, [])) < 50_000


def test_text_of_a_run_never_becomes_markup():
    metrics = {f"val-core/{EVIL}/acc/mean@1": 0.1, "timing_s/<script>": 0.1}
    steps = {step: {**values, **metrics} for step, values in made(1).steps.items()}
    found = compare(RunMetrics(EVIL, steps), replace(made(1), name=EVIL, steps=steps))
    text = page(found, [EVIL])
    assert text.count("<script") == 1
    assert text.count("</style>") == 1
    assert "&lt;script&gt;alert(1)" in text


def test_rows_that_are_0_in_both_runs_are_named_and_not_shown():
    data = {"timing_s/step": 5.0, "timing_s/gen": 4.0, "timing_s/adv": 0.0002, "fuse/samples_missing": 0.0}
    one = RunMetrics.of("one", [(step, data) for step in (1, 2, 3)])
    other = RunMetrics.of("other", [(step, data | {"timing_s/drain": 0.001}) for step in (1, 2, 3)])
    text = page(compare(one, other), [])
    assert "<th>adv</th>" not in text
    assert '<p class="hint">0 s in both: adv</p>' in text
    assert "<th>drain</th><td>0.000 s</td><td>0.001 s</td>" in text
    assert "0 or not logged in both: tokens trained, samples trained, samples missing, fallbacks" in text
    assert "<th>steps</th><td>3</td><td>3</td>" in text


def test_timelines_are_linked_where_there_are_any():
    found = compare(made(1, "one"), made(1, "two", fused=True))
    assert "<a " not in page(found, [])
    text = page(found, [], {"fused": '../"two"/timeline.html'})
    assert (
        '<span>base: one</span><span>fused: two (<a href="../&quot;two&quot;/timeline.html">timeline</a>)</span>'
        in text
    )


def test_a_point_knows_how_long_the_steps_up_to_it_took():
    run = RunMetrics.of("run", [(step, {"timing_s/step": 5.0, "critic/score/mean": 0.1}) for step in (1, 2, 3)])
    assert run.elapsed() == {1: 5.0, 2: 10.0, 3: 15.0}
    text = page(compare(run, run), [])
    assert 'data-base="1 5,2 10,3 15" data-fused="1 5,2 10,3 15"' in text


def test_the_numbers_at_the_axes_have_room():
    run = RunMetrics.of("run", [(step, {"timing_s/step": 5.0, "actor/ppo_kl": -0.00123 * step}) for step in (1, 2, 3)])
    text = page(compare(run, run), [])
    ends = re.findall(r'<text x="(\d+)" y="[\d.]+" text-anchor="end">([^<]+)</text>', text)
    assert [value for _, value in ends] == ["-0.00369", "-0.00123"]
    # A digit of 11 px is less than 7 px wide.
    assert all(7 * len(value) <= int(x) for x, value in ends)


def test_a_metric_that_never_changes_and_a_single_step_are_drawn():
    run = RunMetrics.of("run", [(1, {"timing_s/step": 5.0, "critic/score/mean": 0.0})])
    text = page(compare(run, run, warm_up=0), [])
    assert '<polyline class="base" data-values="1 0"/>' in text
    assert "nan" not in text
