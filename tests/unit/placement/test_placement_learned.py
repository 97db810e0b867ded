"""Shows the invariants of plugins/verl_fuse_placement/learned.py."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from placed_steps import FLAT, SEQUENCE, STEP, TAIL, placed_step

from verl_fuse.errors import FuseError
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Timeline
from verl_fuse_placement.learned import KEPT, PLACEMENT_STEPS, CriticMemory, PlacementHistory, step_parts


def history(*steps) -> PlacementHistory:
    """After these steps of four replicas, and a first one in which everything was cold."""
    found = PlacementHistory(4, capacity=Capacity(32, 32 * 1024))
    for step in (placed_step(FLAT, update=99.0), *steps):
        found.learn(*step)
    return found


def test_the_first_step_teaches_nothing():
    assert (list(history().steps), history().decode) == ([], None)


@pytest.mark.parametrize("critic", [None, range(3, 4), range(2, 4)], ids=str)
def test_the_parts_of_a_step_are_those_of_one_device_wherever_the_critic_is(critic):
    replicas = 4 - len(critic or ())
    timeline, _ = placed_step(TAIL, update=8.0, critic=critic, replicas=replicas)
    parts = step_parts(timeline)
    (generation,) = [span.seconds for span in timeline.on("step") if span.name == "gen"]
    assert parts.replicas == replicas
    assert astuple(parts)[1:] == pytest.approx((generation, 2.0, 8.0, 1.0, 1.0))


@pytest.mark.parametrize("missing", ["gen", "values", "update_critic", "request"])
def test_a_step_that_lacks_a_part_teaches_nothing(missing):
    timeline, lengths = placed_step(TAIL, update=8.0)
    left = tuple(span for span in timeline.spans if span.name != missing)
    timeline = Timeline("run", 2, timeline.start, timeline.end, left)
    assert step_parts(timeline) is None
    assert list(history((timeline, lengths)).steps) == []


def test_a_step_whose_decoding_has_no_cost_per_sequence_teaches_nothing():
    assert list(history(placed_step(TAIL, update=8.0, sequence=0.0)).steps) == []
    known = history(placed_step(TAIL, update=8.0))
    assert (known.decode.step, known.decode.sequence) == (pytest.approx(STEP, 0.1), pytest.approx(SEQUENCE, 0.3))


def test_values_on_slices_are_work_too():
    timeline, _ = placed_step(TAIL, update=8.0)
    (stage,) = [span for span in timeline.on("step") if span.name == "values"]
    on_slices = type(stage)("values", "slice 1", "inference", 0.0, 3.0)
    parts = step_parts(Timeline("run", 2, timeline.start, timeline.end, (*timeline.spans, on_slices)))
    assert (parts.values, parts.late) == (pytest.approx(4.0), pytest.approx(1.0))


def test_two_updates_in_one_step_are_one_on_average():
    timeline, _ = placed_step(TAIL, update=8.0)
    (call,) = [s for s in timeline.spans if s.name == "update_critic" and s.track.startswith("lane")]
    twice = (*timeline.spans, replace(call, start=call.start - 30.0, end=call.end - 30.0))
    assert step_parts(replace(timeline, spans=twice)).update == pytest.approx(step_parts(timeline).update)


def test_a_stage_of_values_that_waited_has_no_more_values_than_were_computed():
    timeline, _ = placed_step(TAIL, update=8.0)
    spans = [replace(s, start=s.start - 5.0) if (s.track, s.name) == ("step", "values") else s for s in timeline.spans]
    parts = step_parts(replace(timeline, spans=tuple(spans)))
    assert (parts.values, parts.late) == (pytest.approx(1.0), pytest.approx(1.0))


def test_what_was_learned_survives_a_checkpoint(tmp_path: Path):
    known = history(*(placed_step(TAIL, update=float(n)) for n in range(1, PLACEMENT_STEPS + 3)))
    known.memory = CriticMemory(1000, 80 << 30)
    known.save(tmp_path, devices=2)
    found = KEPT.load(tmp_path, devices=2)
    assert (found.replicas, found.capacity, found.memory) == (4, known.capacity, known.memory)
    assert found.decode == known.decode
    assert len(found.steps) == PLACEMENT_STEPS
    for (rows, parts), (kept, same) in zip(found.steps, known.steps, strict=True):
        np.testing.assert_array_equal(rows, kept)
        assert parts == same
    assert found.cold, "its first step loads and compiles again"
    assert KEPT.load(tmp_path, devices=4) is None


def test_engines_and_devices_without_limits_survive_too(tmp_path: Path):
    PlacementHistory(4, capacity=Capacity(8), memory=CriticMemory(10, None)).save(tmp_path, devices=1)
    found = KEPT.load(tmp_path, devices=1)
    assert (found.capacity, found.memory, found.decode) == (Capacity(8), CriticMemory(10, None), None)


def test_a_damaged_file_is_named(tmp_path: Path):
    history(placed_step(TAIL, update=8.0)).save(tmp_path, devices=1)
    file = KEPT.file(tmp_path)
    file.write_text(file.read_text().replace('"lengths": [[', '"lengths": [[[1], '))
    with pytest.raises(FuseError, match=r"fuse_placement\.json: not what fuse\.placement writes"):
        KEPT.load(tmp_path, devices=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("replicas", 0),
        ("replicas", 1.5),
        ("sequences", 0),
        ("tokens", -1),
        ("tokens", 0),
        ("memory", {"parameters": "many", "device": None}),
        ("memory", {"parameters": 10, "device": -1}),
        ("steps", [[0, 1.0, 1.0, 1.0, 1.0, 1.0]]),
        ("steps", [[1, 1.0, 1.0, 1.0, 1.0, float("nan")]]),
    ],
)
def test_costs_that_are_none_are_refused(tmp_path: Path, key: str, value: object):
    history(placed_step(TAIL, update=8.0)).save(tmp_path, devices=1)
    data = json.loads(KEPT.file(tmp_path).read_text())
    data["costs"][key] = value
    KEPT.file(tmp_path).write_text(json.dumps(data))
    with pytest.raises(FuseError, match=r"fuse_placement\.json: not what fuse\.placement writes"):
        KEPT.load(tmp_path, devices=1)


def test_lengths_below_zero_are_refused(tmp_path: Path):
    history(placed_step(TAIL, update=8.0)).save(tmp_path, devices=1)
    data = json.loads(KEPT.file(tmp_path).read_text())
    data["lengths"][0][0][1] = -1
    KEPT.file(tmp_path).write_text(json.dumps(data))
    with pytest.raises(FuseError, match=r"fuse_placement\.json: not what fuse\.placement writes"):
        KEPT.load(tmp_path, devices=1)
