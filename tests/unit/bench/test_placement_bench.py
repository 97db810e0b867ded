"""Predicted seconds of the bench `placement` are those of the control less the update that generation hides."""

from ci.bench.placement import predicted


def step(generation: float, update: float, idle: float) -> dict:
    return {"seconds": 10.0, "idle": idle, "parts": {"gen": generation, "update_critic": update}}


def test_cores_that_work_hide_nothing():
    assert predicted([step(4.0, 3.0, idle=1.5), step(4.0, 3.0, idle=3.5)], idle_cores=False) == [8.5, 7.0]


def test_with_idle_cores_generation_alone_is_the_limit():
    assert predicted([step(4.0, 3.0, idle=0.0), step(2.0, 3.0, idle=0.0)], idle_cores=True) == [7.0, 8.0]
