from pathlib import Path

import numpy as np
import pytest
from rollouts import generated, timeline

from verl_fuse.errors import FuseError
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Span
from verl_fuse_interstage.learned import KEPT, REMEMBERED_STEPS, InterstageHistory
from verl_fuse_interstage.measured import DraftedDecode

LENGTHS = {"math": [(9, 20), (9, 50)], "code": [(5, 30)]}


def step(pace: float, inference: float, migration: float | None = None):
    """Return a step of one replica that decodes at `pace`, its lane, and the seconds of freeing it."""
    spans = generated([20, 50, 30], 4, pace, 0.0)
    end = max(span.end for span in spans)
    spans.append(Span("micro-group", "lane slice 0", "inference", end, end + inference, {"micro_group": 0}))
    if migration is not None:
        spans.append(Span("migrate", "replica 0", "other", 0.0, migration))
    return timeline(*spans)


def test_the_first_step_teaches_lengths_and_no_cost():
    learned = InterstageHistory()
    learned.learn(step(5.0, 90.0, 8.0), LENGTHS, replicas=1, capacity=Capacity(4))
    assert (learned.decode, learned.inference, learned.migration) == (None, None, 0.0)
    assert {source: len(steps) for source, steps in learned.lengths.items()} == {"math": 1, "code": 1}
    learned.learn(step(0.1, 4.92, 0.5), LENGTHS, replicas=1, capacity=Capacity(4))
    assert learned.decode.step == pytest.approx(0.1)
    assert (learned.inference.per_token, learned.migration) == (pytest.approx(4.92 / 123), 0.5)
    learned.learn(timeline(), LENGTHS, replicas=1, capacity=Capacity(4))
    assert learned.decode.step == pytest.approx(0.1), "a step that measured nothing changes nothing"


def test_answers_of_tools_are_prefilled_and_not_decoded():
    learned = InterstageHistory()
    # The step's engines generated 20 + 50 + 30 of 200 tokens of responses; a discarded sample had 100 of these.
    learned.learn(step(0.1, 5.0), LENGTHS, replicas=1, capacity=Capacity(4), responses=200)
    assert learned.lengths["math"][0].tolist() == [[19, 10], [34, 25]]
    assert learned.lengths["code"][0].tolist() == [[20, 15]]
    learned.learn(step(0.1, 5.0), LENGTHS, replicas=1, capacity=Capacity(4), responses=100)
    assert learned.lengths["math"][0].tolist() == [[9, 20], [9, 50]]


def test_what_was_learned_survives_a_checkpoint(tmp_path: Path):
    learned = InterstageHistory()
    for number in range(REMEMBERED_STEPS + 3):
        learned.learn(step(0.1, 5.0, 0.5), {"math": [(9, number)], **LENGTHS}, replicas=1, capacity=Capacity(4))
    learned.drafted, learned.update = DraftedDecode(0.1, 0.01, 2.5, 4.0), 0.25
    learned.save(tmp_path, devices=1)
    found = KEPT.load(tmp_path, devices=1)
    assert (found.decode, found.inference, found.migration) == (learned.decode, learned.inference, 0.5)
    assert (found.drafted, found.update) == (learned.drafted, 0.25)
    assert found.lengths.keys() == learned.lengths.keys()
    for source, steps in learned.lengths.items():
        assert len(steps) == REMEMBERED_STEPS
        for kept, known in zip(found.lengths[source], steps, strict=True):
            np.testing.assert_array_equal(kept, known)
    found.learn(step(0.1, 5.0), LENGTHS, replicas=1, capacity=Capacity(4))
    assert len(found.lengths["math"]) == REMEMBERED_STEPS
    other = KEPT.load(tmp_path, devices=8)
    assert (other.decode, other.inference, other.update, other.migration) == (None, None, None, 0.0)
    assert other.lengths.keys() == learned.lengths.keys()


@pytest.mark.parametrize(
    "lengths",
    [
        "[1]",
        '{"math": [[1, 2]]}',
        '{"math": [[[1, 2, 3]]]}',
        '{"math": [[[1, -2]]]}',
        '{"math": [[[1, 0.5]]]}',
        '{"math": [[]]}',
    ],
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, lengths: str):
    InterstageHistory().save(tmp_path, devices=1)
    file = KEPT.file(tmp_path)
    file.write_text(file.read_text().replace('"lengths": {}', f'"lengths": {lengths}'))
    with pytest.raises(FuseError, match=r"fuse_interstage\.json: not what fuse\.interstage writes"):
        KEPT.load(tmp_path, devices=1)
