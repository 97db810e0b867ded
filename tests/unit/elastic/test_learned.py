import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse.timeline.generated import generated_tokens
from verl_fuse_elastic.corrections import Corrections, Unforetold
from verl_fuse_elastic.learned import KEPT, ElasticHistory
from verl_fuse_elastic.scaling import Forecast

MATH = Prompt("1", "a", "math", 2)


def step(pace: float, *started: float, replicas: tuple[int, ...] = (0,)) -> Timeline:
    """Every replica generated one response of 100 tokens; replicas were created in `started` seconds."""
    args = {"prompt_tokens": 9, "response_tokens": 100, "stop_reason": "completed"}
    spans = [Span("request", f"replica {rank}", "generate", 0.0, 100 * pace, args) for rank in replicas]
    spans += [Span("start", f"replica {8 + n}", "other", 0.0, seconds) for n, seconds in enumerate(started)]
    return Timeline("run", 1, 0.0, 1000.0, tuple(spans))


def test_the_first_step_of_a_replica_is_no_cost_of_decoding():
    learned = ElasticHistory()
    learned.learn_costs(step(5.0), Capacity(4))
    assert learned.decode is None
    learned.learn_costs(step(0.1), Capacity(4))
    assert learned.decode == pytest.approx(DecodeCost(0.1, 0.0))
    # One that joins is cold in its own first step, the other is not.
    learned.learn_costs(step(0.2, replicas=(0,)), Capacity(4))
    assert learned.decode.step == pytest.approx(0.2)
    joined = step(9.0, replicas=(1,)).spans + step(0.3).spans
    learned.learn_costs(Timeline("run", 4, 0.0, 1000.0, joined), Capacity(4))
    assert learned.decode.step == pytest.approx(0.3)


def test_what_creating_a_replica_took_is_what_it_always_takes():
    learned = ElasticHistory()
    learned.learn_costs(step(5.0, 30.0, 40.0), Capacity(4))
    assert learned.launch_seconds == 40.0
    learned.learn_costs(step(0.1), Capacity(4))
    assert learned.launch_seconds == 40.0


def test_what_was_learned_survives_a_checkpoint(tmp_path: Path):
    learned = ElasticHistory(decode=DecodeCost(0.02, 0.001), launch_seconds=31.5)
    learned.predictor.observe([(MATH, [30, 50])])
    learned.save(tmp_path, devices=2)
    found = KEPT.load(tmp_path, devices=2)
    assert (found.decode, found.launch_seconds) == (DecodeCost(0.02, 0.001), 31.5)
    assert found.predictor.predict([MATH]) == learned.predictor.predict([MATH])
    other = KEPT.load(tmp_path, devices=1)
    assert (other.decode, other.launch_seconds) == (None, 0.0)
    assert other.predictor.predict([MATH]) == learned.predictor.predict([MATH])


def test_corrections_survive_a_checkpoint_with_replicas_of_as_many_devices(tmp_path: Path):
    learned = ElasticHistory()
    for count, taken in ((2, 10.0), (1, 15.0), (2, 11.0)):
        model = Forecast(count, 12.0 / count, 12.0)
        learned.corrections.learn(lambda each, model=model: model, 4, taken, count * taken)
    learned.save(tmp_path, devices=2)
    found = KEPT.load(tmp_path, devices=2).corrections
    assert found.unforetold == learned.corrections.unforetold != Unforetold()
    model = Forecast(4, 3.0, 12.0)
    assert found.outcomes.expected(model) == learned.corrections.outcomes.expected(model) != model
    assert found.outcomes.hoped(model) == learned.corrections.outcomes.hoped(model)
    assert KEPT.load(tmp_path, devices=1).corrections.to_dict() == Corrections().to_dict()
    data = json.loads(KEPT.file(tmp_path).read_text())
    del data["costs"]["corrections"]
    KEPT.file(tmp_path).write_text(json.dumps(data))
    assert KEPT.load(tmp_path, devices=2).corrections.to_dict() == Corrections().to_dict(), (
        "an earlier release wrote none"
    )


@pytest.mark.parametrize(
    "outcomes",
    [
        {"first": 0},
        {"first": 1, "last": 0},
        {"means": [[0.0, 0.0]]},
        {"means": [[0.0, float("nan")], [0.0, 0.0]]},
        {"covariance": [[1.0, 2.0], [2.0, 1.0]]},
        {"covariance": None},
    ],
)
def test_corrections_that_are_none_are_refused(tmp_path: Path, outcomes: dict):
    learned = ElasticHistory()
    learned.corrections.learn(lambda each: Forecast(2, 6.0, 12.0), 4, 10.0, 20.0)
    learned.save(tmp_path, devices=1)
    data = json.loads(KEPT.file(tmp_path).read_text())
    data["costs"]["corrections"]["outcomes"] |= outcomes
    KEPT.file(tmp_path).write_text(json.dumps(data))
    with pytest.raises(FuseError, match=r"fuse_elastic\.json: not what fuse\.elastic writes"):
        KEPT.load(tmp_path, devices=1)


def test_shares_of_generated_tokens_survive_a_checkpoint_and_an_older_one_has_none(tmp_path: Path):
    learned = ElasticHistory()
    turn = step(0.1).spans[0]
    spans = tuple(replace(turn, start=at, args={**turn.args, "prompt": "1"}) for at in (0.0, 2.0))
    generation = Span("gen", "step", "stage", 0.0, 500.0)
    timeline = Timeline("run", 1, 0.0, 1000.0, (generation, *spans))
    learned.shares.learn(generated_tokens(timeline), {"1": MATH}, {"1": [150, 250]})
    assert learned.shares.of("math") == 0.5
    learned.save(tmp_path, devices=1)
    assert KEPT.load(tmp_path, devices=8).shares == learned.shares
    data = json.loads(KEPT.file(tmp_path).read_text())
    del data["lengths"]["generated"]
    KEPT.file(tmp_path).write_text(json.dumps(data))
    assert KEPT.load(tmp_path, devices=1).shares.of("math") == 1.0


def test_before_decoding_was_measured_lengths_are_kept_alone(tmp_path: Path):
    ElasticHistory().save(tmp_path, devices=1)
    assert KEPT.load(tmp_path, devices=1).decode is None


@pytest.mark.parametrize("decode", ["{}", '{"step": -1, "sequence": 0}', '{"step": 0.1, "sequence": null}', "[1, 2]"])
def test_costs_that_are_none_are_refused(tmp_path: Path, decode: str):
    ElasticHistory().save(tmp_path, devices=1)
    file = KEPT.file(tmp_path)
    file.write_text(file.read_text().replace('"decode": null', f'"decode": {decode}'))
    with pytest.raises(FuseError, match=r"fuse_elastic\.json: not what fuse\.elastic writes"):
        KEPT.load(tmp_path, devices=1)


@pytest.mark.parametrize(
    "lengths",
    [
        {"means": {"a": -1}},
        {"means": {"a": float("nan")}},
        {"recent": {"math": []}},
        {"recent": {"math": [3, -1]}},
        {"recent": {"math": [0.5]}},
        {"errors": [float("inf")]},
        {"generated": {"math": -0.1}},
    ],
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, lengths: dict):
    ElasticHistory().save(tmp_path, devices=1)
    data = json.loads(KEPT.file(tmp_path).read_text())
    data["lengths"] |= lengths
    KEPT.file(tmp_path).write_text(json.dumps(data))
    with pytest.raises(FuseError, match=r"fuse_elastic\.json: not what fuse\.elastic writes"):
        KEPT.load(tmp_path, devices=1)
