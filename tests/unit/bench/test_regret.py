import pytest

from ci.bench.support.regret import Taken, frontier, judged, objective, regret

# Two steps; one replica is slow and cheap, two are fast, and in the second step they are no dearer.
ONE = [Taken(10.0, 10.0), Taken(8.0, 8.0)]
TWO = [Taken(6.0, 12.0), Taken(4.0, 8.0)]
FIXED = {"fixed 1": ONE, "fixed 2": TWO}


def test_a_steps_objective_is_relative_to_all_replicas():
    assert objective(TWO[0], TWO[0], 0.3) == pytest.approx(1.0)
    assert objective(ONE[0], TWO[0], 0.0) == pytest.approx(10 / 6)
    assert objective(ONE[0], TWO[0], 1.0) == pytest.approx(10 / 12)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_best_choice_of_every_step_has_no_regret(weight):
    best = [min((one, two), key=lambda step: objective(step, two, weight)) for one, two in zip(ONE, TWO, strict=True)]
    assert regret(best, FIXED, "fixed 2", weight) == 0.0


def test_regret_is_against_the_best_of_each_step_and_not_of_all():
    # For cost alone one replica is best in the first step, and as good as two in the second.
    assert regret(TWO, FIXED, "fixed 2", 1.0) == pytest.approx(2 / (10 / 12 + 1) - 1)
    assert regret(ONE, FIXED, "fixed 2", 1.0) == 0.0
    assert regret(ONE, FIXED, "fixed 2", 0.0) == pytest.approx((10 / 6 + 2) / 2 - 1)


def test_the_frontier_leaves_out_what_another_choice_beats_in_both():
    three = [Taken(7.0, 15.0), Taken(5.0, 9.0)]
    found = frontier({**FIXED, "fixed 3": three})
    assert list(found) == ["fixed 2", "fixed 1"]
    assert found["fixed 2"] == Taken(10.0, 20.0)


def test_a_policy_outside_the_frontier_is_said_to_be_beaten():
    found = judged({0.5: [Taken(7.0, 15.0), Taken(5.0, 9.0)]}, FIXED, "fixed 2")
    assert found["policy"]["0.5"]["beaten_by"] == ["fixed 2"]
    assert found["fixed"]["fixed 1"] == {"seconds": 18.0, "replica_seconds": 18.0, "frontier": True}
    assert judged({0.5: ONE}, FIXED, "fixed 2")["policy"]["0.5"]["beaten_by"] == []
