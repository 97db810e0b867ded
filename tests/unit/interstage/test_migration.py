from dataclasses import replace

import pytest

from verl_fuse.spec.step import Migration, ReplicaView
from verl_fuse.testing import replicas
from verl_fuse.testing import view as seen
from verl_fuse_interstage.migration import Hindrances, Trigger, configured, hindrance, survivors, tail_migration


def view(unfinished, replicas, expected=64):
    return seen(expected=expected, finished=expected - unfinished, replicas=replicas)


@pytest.mark.parametrize(
    ("wanted", "samples"), [(None, 0), (0, 0), (0.0, 0), (12, 12), (1, 1), (0.25, 16), (1.0, 64), (0.01, 0)]
)
def test_a_whole_number_counts_samples_and_a_fraction_is_of_the_step(wanted, samples):
    assert configured(wanted, expected=64) == Trigger(samples)


def decided(unfinished, found, wanted=8):
    return tail_migration(configured(wanted, expected=64), view(unfinished, found))


def test_nothing_moves_before_the_threshold_is_reached():
    running = replicas([5, 4])
    assert decided(9, running) is None
    assert decided(8, running) == Migration(survivors=(0,))


@pytest.mark.parametrize("wanted", [None, 0, 0.0])
def test_a_threshold_of_zero_never_moves_anything(wanted):
    assert [decided(unfinished, replicas([1, 1]), wanted) for unfinished in (0, 1, 2)] == [None, None, None]


def test_nothing_moves_when_all_samples_are_finished():
    assert decided(0, replicas([0, 0])) is None


def test_nothing_moves_twice_in_a_step():
    first, second, third = replicas([4, 2, 1])
    gone = ReplicaView(third.rank, 0, third.slots, routed=False)
    assert decided(5, (first, second, gone)) is None


def test_a_single_replica_keeps_its_tail():
    assert decided(3, replicas([3])) is None


def test_the_busiest_replicas_survive_and_ties_go_to_the_lower_rank():
    assert survivors(replicas([1, 4, 4, 2]), unfinished=8) == (1,)
    assert survivors(replicas([1, 4, 4, 2]), unfinished=9) == (1, 2)
    assert survivors(replicas([1, 4, 4, 2]), unfinished=17) == (1, 2, 3)


def test_samples_between_two_turns_count_as_work():
    busy, waiting = replicas([3, 1])
    assert survivors((busy, replace(waiting, assigned=16, unfinished=5)), unfinished=8) == (1,)
    assert survivors((busy, replace(waiting, assigned=16, unfinished=2)), unfinished=8) == (0,)


def test_the_survivors_have_room_for_every_unfinished_sample():
    assert survivors(replicas([3, 3, 3], slots=2), unfinished=5) == (0, 1, 2)
    assert decided(5, replicas([3, 2, 0], slots=2)) is None, "all replicas are needed: nothing would be freed"
    assert decided(4, replicas([2, 2, 0], slots=2)) == Migration(survivors=(0, 1))


def test_more_survivors_than_the_least_may_be_asked_for():
    running = replicas([1, 4, 4, 2])
    assert tail_migration(Trigger(8, survivors=2), view(6, running)) == Migration(survivors=(1, 2))
    assert tail_migration(Trigger(8, survivors=4), view(6, running)) is None


def test_replicas_with_requests_that_cannot_move_survive():
    assert survivors(replicas([5, 1, 2], unmovable=[0, 1, 0]), unfinished=8) == (1,)
    assert survivors(replicas([5, 1, 2], unmovable=[0, 1, 0]), unfinished=9) == (0, 1)
    assert decided(8, replicas([4, 2, 2], unmovable=[0, 1, 1])) == Migration(survivors=(1, 2))
    assert decided(8, replicas([4, 2, 2], unmovable=[1, 1, 1])) is None


def gone(view):
    return ReplicaView(view.rank, 0, view.slots, routed=False)


def test_where_requests_cannot_move_replicas_are_freed_one_after_the_other_as_they_run_out():
    first = replicas([3, 0, 2], unmovable=[3, 0, 2])
    assert decided(5, first) == Migration(survivors=(0, 2))
    assert decided(4, (first[0], gone(first[1]), first[2])) is None
    later = replicas([3, 0, 0], unmovable=[3, 0, 0])
    assert decided(3, (later[0], gone(later[1]), later[2])) == Migration(survivors=(0,))
    mixed = replicas([3, 0, 1], unmovable=[3, 0, 0])
    assert decided(4, (mixed[0], gone(mixed[1]), mixed[2])) is None, "nothing moves twice"


def why(unfinished, found, trigger=None):
    return hindrance(trigger or Trigger(8), view(unfinished, found))


def test_what_keeps_a_tail_that_is_due_is_told():
    assert why(5, replicas([3, 2, 0], slots=2)) == "room"
    assert why(4, replicas([2, 2, 0], slots=2)) is None, "it moves"
    assert why(9, replicas([5, 4], slots=2)) is None, "it is not due"
    assert why(5, replicas([5], slots=2)) is None, "there is nowhere to go"
    assert why(5, replicas([3, 2], slots=2), Trigger(8, survivors=2)) is None, "nothing was to be freed"
    assert why(6, replicas([3, 3], unmovable=[1, 2])) == "unmovable"
    first, second = replicas([3, 0], slots=2)
    assert why(3, (first, gone(second))) is None, "it has moved"


def test_a_migration_names_the_key_that_asked_for_it():
    assert decided(8, replicas([5, 3])).cause == "fuse.interstage.migration_threshold"


def test_each_hindrance_is_said_once_a_step(caplog):
    crowded, stuck = view(8, replicas((4, 4), slots=4)), view(8, replicas((4, 4), slots=4, unmovable=(4, 4)))
    found = Hindrances()
    with caplog.at_level("INFO"):
        for seen in (crowded, crowded, stuck, stuck):
            found.look(Trigger(8), seen)
    assert (found.found, len(caplog.messages)) == ({"room", "unmovable"}, 2)
