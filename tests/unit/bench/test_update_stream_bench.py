from pathlib import Path

import numpy as np

from ci.bench.update_stream import ARMS, FIRST, LONG, SAMPLES, SHORT, make_plan, overrides, report


def step(seconds: float, gen: float, update: float, correlation: float = 0.0) -> dict:
    own = {"tokens": 0.5, "complete_tokens": 0.6, "missed_tokens": 0.1, "seconds": 1.0, "calls": 3, "fallbacks": 0.0}
    return {
        "seconds": seconds,
        "parts": {"gen": gen, "update_actor": update},
        "samples": SAMPLES,
        "lost": 0,
        "duplicated": 0,
        "correlation": correlation,
        "own": {f"fuse/stream_{name}": value for name, value in own.items()},
    }


def test_the_stream_is_compared_with_the_faster_of_stocks_layouts():
    found = {
        "stock": [step(10.0, 4.0, 4.0)] * 3,
        "copies": [step(8.0, 4.0, 3.0)] * 3,
        "lean": [step(7.0, 4.0, 3.0)] * 3,
        "stream": [step(5.0, 4.5, 1.0), step(5.0, 4.5, 1.0, 0.8), step(5.0, 4.5, 1.0, 0.8)],
    }
    line = report(found)
    assert (line["faster_layout"], line["ratio"], line["interval"]) == ("copies", 1.6, [1.6, 1.6])
    assert line["over_lean"] == (1.4, [1.4, 1.4])
    assert line["bounds"] == {"generation_grew": 0.5, "update_left": 1.0, "missed_tokens": 0.1}
    assert line["generation_over_copies"][0] == 1.125
    assert {alike: found["tokens"] for alike, found in line["streamed"].items()} == {"0.0": 0.5, "0.8": 0.5}
    assert line["steps"] == 3


def test_all_arms_generate_the_same_and_none_has_what_only_another_asks_for():
    # Hydra takes the last of several.
    settings = {arm: dict(one.partition("=")[::2] for one in overrides(Path("f"), arm, Path("f/0"), 9)) for arm in ARMS}
    assert {one["data.max_response_length"] for one in settings.values()} == {str(LONG)}
    asked = {"fuse.update.stream": "true", "actor_rollout_ref.actor.fsdp_config.fsdp_size": "1"}
    having = {key: [arm for arm in ARMS if settings[arm].get(key) == value] for key, value in asked.items()}
    assert list(having.values()) == [["stream"], ["copies", "stream"]]
    assert "fuse.update.skip_zero_gradient" not in settings["lean"]
    plan = make_plan(FIRST + 2, 0)
    assert [max(lengths) for lengths in plan["lengths"]] == [LONG] * 4
    assert all(sorted(lengths)[-2] <= SHORT for lengths in plan["lengths"])


def test_lengths_of_a_group_are_alike_in_every_other_round():
    def alike(number: int) -> float:
        groups = np.log(np.reshape(make_plan(40, number)["lengths"], (-1, 8)))
        groups = groups[groups.max(axis=1) < np.log(LONG)]
        return float(1 - groups.var(axis=1, ddof=1).mean() / groups.var(ddof=1))

    assert abs(alike(0)) < 0.1
    assert alike(1) > 0.6
