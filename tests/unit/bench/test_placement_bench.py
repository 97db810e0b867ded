"""Predicted seconds of the bench `placement` are those of the control less the updates that generation hides."""

from ci.bench.placement import predicted


def step(number: int, generation: float, update: float, idle: float) -> dict:
    return {"step": number, "seconds": 10.0, "idle": idle, "parts": {"gen": generation, "update_critic": update}}


def test_a_core_that_works_hides_nothing():
    assert predicted([step(2, 4.0, 3.0, idle=1.5), step(3, 4.0, 3.0, idle=3.5)], idle_core=False) == [8.5, 7.0]


def test_on_an_idle_core_generation_hides_the_update_of_the_step_before():
    steps = [step(2, 4.0, 3.0, 0.0), step(3, 2.0, 1.0, 0.0), step(4, 4.0, 3.0, 0.0), step(2, 4.0, 2.0, 0.0)]
    assert predicted(steps, idle_core=True) == [7.0, 8.0, 9.0, 8.0]
