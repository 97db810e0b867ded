"""The analytic model against passes measured on one H100; which constants they gave is said in
verl_fuse/cost/calibration.py."""

import dataclasses
import json
from pathlib import Path

import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import FRAMEWORK, GRAPHS
from verl_fuse.cost.model import Batch
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model_names import model_named

PASSES = json.loads(Path(__file__).with_name("h100_passes.json").read_text())
MODEL, ONE = model_named("qwen2.5-1.5b"), dataclasses.replace(cluster_named("h100"), devices_per_node=1)
CONTEXT = 114


@pytest.mark.parametrize(("mode", "error"), [("overlapped", 0.27), ("sequential", 0.08)])
def test_decode_passes(mode: str, error: float):
    """256 sequences took 5.7 ms when they were timed, and 6.9 and 10.1 when their prompts were repeated."""
    cost = AnalyticCost(ONE, dataclasses.replace(GRAPHS, overlap=mode == "overlapped"))
    for sequences, milliseconds in PASSES["decode"][mode].items():
        seconds = float(cost.decode(MODEL, Layout(), float(sequences), CONTEXT * float(sequences)))
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=error)


@pytest.mark.parametrize("drafted", [0, 3, 8])
def test_passes_with_a_drafter(drafted: int):
    """All drafts are rejected. Passes of 3 and 8 drafts of one request have a full graph, which the model does not
    know."""
    for sequences, milliseconds in PASSES["decode"]["drafter"][str(drafted)].items():
        count = float(sequences)
        seconds = float(AnalyticCost(ONE, GRAPHS).verify(MODEL, Layout(), count, drafted, CONTEXT * count))
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.3 if drafted else 0.06)


@pytest.mark.parametrize("row", PASSES["training"]["rows"], ids=str)
def test_training_passes(row: list[float]):
    """Transformers' operators, as under FSDP; one device has nothing to gather."""
    count, length, log_probs, with_entropy, training = row
    cost, layout, batch = AnalyticCost(ONE, FRAMEWORK), Layout(shards=1), Batch.equal(count, length)
    (forward,) = cost.stage_seconds(MODEL, layout, batch)
    (backward,) = cost.stage_seconds(MODEL, layout, batch, backward=True, recompute=True)
    assert forward == pytest.approx(log_probs, rel=0.09)
    assert forward + backward == pytest.approx(training, rel=0.09)
    entropy = [cost.infer(MODEL, layout, batch, 1, entropy=also) for also in (True, False)]
    assert entropy[0] - entropy[1] == pytest.approx(with_entropy - log_probs, rel=0.15)


@pytest.mark.parametrize("row", PASSES["training"]["logits"]["rows"], ids=str)
def test_passes_with_logits_of_responses_alone(row: list[float]):
    """No constant was chosen by these."""
    count, length, prompt, training, log_probs = row
    cost, layout, batch = AnalyticCost(ONE, FRAMEWORK), Layout(shards=1), Batch.equal(count, length)
    fewer = dataclasses.replace(batch, logits=count * (length - prompt))
    forward, less = (cost.stage_seconds(MODEL, layout, one)[0] for one in (batch, fewer))
    backward, least = (
        cost.stage_seconds(MODEL, layout, one, backward=True, recompute=True)[0] for one in (batch, fewer)
    )
    assert less / forward == pytest.approx(log_probs, abs=0.03)
    assert (less + least) / (forward + backward) == pytest.approx(training, abs=0.03)
