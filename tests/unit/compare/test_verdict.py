"""The sentence about two runs."""

import pytest
from made_runs import made

from verl_fuse.compare.comparison import Comparison, compare
from verl_fuse.compare.intervals import Interval
from verl_fuse.compare.run import RunMetrics
from verl_fuse.compare.verdict import at_least, difference_text, interval_text, notes, verdict


def runs(base: list[float], fused: list[float], rewards: list[float] | None = None, **metrics: float) -> Comparison:
    """Steps of these seconds after one of warm-up; `rewards` of the fused run, those of the baseline being 0.5 each."""

    def of(name: str, seconds: list[float], scores: list[float] | None, extra: dict) -> RunMetrics:
        steps = enumerate([9.0, *seconds])
        return RunMetrics.of(
            name,
            [
                (
                    step + 1,
                    {
                        "timing_s/step": value,
                        **({} if scores is None else {"critic/score/mean": scores[step]}),
                        **extra,
                    },
                )
                for step, value in steps
            ],
        )

    scores = None if rewards is None else [0.5] * (len(base) + 1)
    ours = {f"fuse/{name}": value for name, value in metrics.items()} or {"fuse/fallbacks": 0.0}
    return compare(of("stock", base, scores, {}), of("fused", fused, rewards, ours))


FAST, SLOW, SAME = [3.7, 3.8, 3.6, 3.7], [5.5, 5.6, 5.4, 5.6], [5.01, 4.99, 5.0, 5.02]
STOCK = [5.0, 5.1, 4.9, 5.0]
EQUAL = "fused steps are 1.00 times as fast as stock's [0.97, 1.03]"
LIKE, HIGHER = [0.5, 0.51, 0.49, 0.52, 0.48], [0.7, 0.71, 0.69, 0.7, 0.72]


@pytest.mark.parametrize(
    ("fused", "rewards", "sentence"),
    [
        (FAST, LIKE, "fused steps are 1.35 times as fast as stock's [1.34, 1.36]; rewards within noise"),
        (SLOW, LIKE, "fused steps are 0.90 times as fast as stock's [0.89, 0.92], slower; rewards within noise"),
        (
            SAME,
            LIKE,
            f"nothing differs beyond noise: {EQUAL}; rewards within noise",
        ),
        (
            SAME,
            HIGHER,
            f"{EQUAL}, within noise; rewards differ by +0.204 [+0.190, +0.218]",
        ),
        (SAME, None, f"{EQUAL}, within noise; no rewards to compare"),
    ],
)
def test_the_sentence(fused: list[float], rewards: list[float] | None, sentence: str):
    assert verdict(runs(STOCK, fused, rewards)) == sentence


def test_of_one_step_nothing_is_claimed():
    found = runs([5.0], [4.0], [0.5, 0.5])
    assert verdict(found) == (
        "one step says nothing of noise: fused steps are 1.25 times as fast as stock's in step 2, the only one that "
        "can be compared"
    )
    assert at_least(found, 0.5) == (
        False,
        (
            "--at-least 0.5: not met: the lower end of the 95 % interval of the speed-up counts, and one step gives no "
            "interval"
        ),
    )


def test_the_lower_end_of_the_interval_decides():
    found = runs(STOCK, FAST, LIKE)
    assert found.speedup.value == pytest.approx(1.35, abs=0.01)
    low = found.speedup.low
    assert low is not None
    assert at_least(found, low - 0.001)[0]
    assert not at_least(found, low + 0.001)[0]
    assert (
        at_least(found, 1.1)[1]
        == f"--at-least 1.1: met: the lower end of the 95 % interval of the speed-up is {low:.3f}"
    )


def test_what_to_know_is_noted():
    assert list(notes(runs(STOCK, FAST, LIKE))) == []
    troubled = list(notes(runs(STOCK, FAST, LIKE, fallbacks=2.0, samples_missing=1.0)))
    assert troubled == [
        "verl-fuse fell back to stock behaviour 2 times: see the run's log.",
        "5 samples were asked for and not trained on in fused.",
    ]
    (longer,) = notes(runs([*STOCK, 5.0], FAST, None))
    assert longer == "stock has 6 timed steps and fused 5: times of the 4 that both have are compared."
    swapped = list(notes(compare(made(1, "one", fused=True), made(1, "two"))))
    assert swapped[0] == "two logged no metric of verl-fuse: it is a run of stock verl."
    assert swapped[1] == "one is a run with verl-fuse itself."


@pytest.mark.parametrize(("counts", "total"), [((0, 3, 5, 0, 0), 5), ((0, 3, 5, 1, 2), 7), ((2, 2, 4, 4, 4), 4)])
def test_fallbacks_before_a_resume_count(counts: tuple[int, ...], total: int):
    """The counter is that of a process."""
    steps = [(n, {"timing_s/step": 5.0, "fuse/fallbacks": float(count)}) for n, count in enumerate(counts, start=1)]
    assert RunMetrics.of("resumed", steps).counted("fuse/fallbacks") == total


@pytest.mark.parametrize(
    ("seconds", "generation", "noted"),
    [(5.0, 2.1, "40%"), (5.0, 1.9, None), (99.0, 50.0, "2%"), (101.0, 50.0, None)],
)
def test_the_wait_of_short_stock_steps_is_noted(seconds: float, generation: float, noted: str | None):
    """A rollout that is complete at verl's first look waits for nothing."""

    def of(name: str, metrics: dict[str, float]) -> RunMetrics:
        step = {"timing_s/step": seconds, "timing_s/gen": generation, **metrics}
        return RunMetrics.of(name, [(number, step) for number in range(1, 6)])

    stock, ours = of("stock", {}), of("ours", {"fuse/fallbacks": 0.0})
    found = list(notes(compare(stock, ours)))
    assert len(found) == (noted is not None)
    assert all("every 2 s" in note and f"up to 2 s late, at most {noted} of these steps" in note for note in found)
    assert list(notes(compare(ours, ours))) == ["ours is a run with verl-fuse itself."]
    assert not any("every 2 s" in note for note in notes(compare(stock, stock)))


def test_polling_that_was_measured_stands_in_place_of_the_longest_wait():
    def of(name: str, seconds: float, metrics: dict[str, float]) -> RunMetrics:
        step = {"timing_s/step": seconds, "timing_s/gen": 2.1, **metrics}
        return RunMetrics.of(name, [(number, step) for number in range(1, 6)])

    found = compare(of("stock", 5.0, {}), of("ours", 4.0, {"fuse/fallbacks": 0.0}))
    assert list(notes(found, Interval(0.7, 0.5, 0.9))) == [
        "Compared with stock verl a step changes by -1.0 [-1.0, -1.0] s. Observe mode alone changes it by "
        "-0.70 [-0.90, -0.50] s: it looks at the rollout more often than verl's every 2 s, and builds agent loops "
        "without Hydra."
    ]


def test_what_an_interval_is_too_wide_to_show_is_noted():
    (note,) = notes(runs([5.0, 6.0, 4.0, 5.5], [5.5, 4.5, 5.2, 5.0], LIKE))
    assert note.startswith("A difference below ")
    assert "steps would show one of 5%." in note


def test_figures_have_as_many_digits_as_tell_their_bounds_apart():
    assert interval_text(Interval(0.7412, 0.703, 0.789)) == "0.74 [0.70, 0.79]"
    assert difference_text(Interval(0.0132, -0.0031, 0.0281)) == "+0.013 [-0.003, +0.028]"
    assert difference_text(Interval(-0.000052, -0.00022, 0.00012)) == "-0.00005 [-0.00022, +0.00012]"
    assert difference_text(Interval(0.0, 0.0, 0.0)) == "+0.000 [+0.000, +0.000]"
    assert difference_text(Interval(12.0, None, None)) == "+12"
