"""The analytic model against ReaL's published throughput of the Megatron heuristic, on A100.

Calibrated on: the three bars of "actor 8" (one node, everything 7B): the engine's floor per block and its memory
traffic. Held out: the other 30.
"""

import numpy as np
import pytest
from real_settings import PROMPT, PUBLISHED, SIZES, Setting, settings

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import EAGER
from verl_fuse.cost.model import Batch
from verl_fuse.spec.layout import Layout

CALIBRATION = [setting for setting in settings() if setting.kind == "actor" and setting.devices == 8]
HELD_OUT = [setting for setting in settings() if setting not in CALIBRATION]


def heuristic_seconds(setting: Setting) -> float:
    """A step of the heuristic: all calls one after the other on all devices with tp 8, pp over nodes, and
    ReaL's micro-batch numbers."""
    cost, workload = AnalyticCost(setting.cluster, EAGER), setting.workload
    pp = setting.devices // 8
    layout = Layout(tp=8, pp=pp)
    count, length = workload.sequences, PROMPT + setting.generated
    steps = np.arange(1, setting.generated)
    seconds = cost.prefill(workload.actor, layout, Batch.equal(count, PROMPT))
    seconds += float(cost.decode(workload.actor, layout, count + 0 * steps, count * (PROMPT + steps)).sum())
    batch = Batch.equal(count, length)
    for call in workload.calls:
        model = workload.model(call.role)
        if call.kind == "infer":
            seconds += cost.infer(model, layout, batch, pp)
        if call.kind == "train":
            seconds += cost.train(model, layout, batch, workload.minibatches, 2 * pp if pp > 1 else 1)
    return seconds


def errors(chosen: list[Setting]) -> np.ndarray:
    return np.array([s.petaflop / heuristic_seconds(s) / s.heuristic - 1 for s in chosen])


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def test_there_are_33_settings():
    assert (len(CALIBRATION), len(HELD_OUT)) == (3, 30)


@pytest.mark.parametrize("generated", [128, 384, 896])
@pytest.mark.parametrize("size", range(4))
def test_operations_are_counted_as_in_the_figure(size: int, generated: int):
    """Published step times times published PFLOP/s give the operations, within the rounding of the bars and 1.5 %."""
    names = ("7B", "13B", "34B", "70B")
    setting = next(s for s in settings() if s.kind == "actor" and s.main == SIZES[size] and s.generated == generated)
    seconds = PUBLISHED["step_seconds_critic_7b"][names[size]][f"gen{generated}"][1]
    assert setting.petaflop == pytest.approx(seconds * setting.heuristic, rel=0.015 + 0.005 / setting.heuristic)


def test_calibration_error():
    assert np.abs(errors(CALIBRATION)).max() < 0.04


def test_held_out_error_and_order():
    found = np.abs(errors(HELD_OUT))
    assert np.median(found) < 0.12
    assert found.max() < 0.40
    predicted = [s.petaflop / heuristic_seconds(s) for s in HELD_OUT]
    assert np.corrcoef(ranks(predicted), ranks([s.heuristic for s in HELD_OUT]))[0, 1] > 0.98
