from dataclasses import replace

import pytest

from verl_fuse.spec.step import Migration, ReplicaView, RolloutView
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.release import Release, released, without_room


def view(*replicas, expected=None, unmovable=()):
    stuck = dict(enumerate(unmovable))
    seen = tuple(
        ReplicaView(
            rank, running, 8, routed=routed, assigned=assigned, unfinished=unfinished, unmovable=stuck.get(rank, 0)
        )
        for rank, (assigned, unfinished, running, routed) in enumerate(replicas)
    )
    total = sum(replica.assigned for replica in seen) if expected is None else expected
    return RolloutView(1, 1.0, total, 0, 4, 0, (), (), seen)


def full(seen):
    return tuple(replace(replica, slots=replica.running) for replica in seen.replicas)


def test_a_replica_that_is_done_stops():
    assert released(view((8, 0, 0, True), (8, 5, 5, True)), 1.0) == Migration((1,))


def test_all_that_are_done_stop_at_once_and_one_goes_on():
    assert released(view((8, 0, 0, True), (8, 0, 0, True), (8, 2, 2, True)), 1.0) == Migration((2,))
    assert released(view((8, 0, 0, True), (8, 0, 0, True)), 1.0) == Migration((0,))
    assert released(view((8, 0, 0, True), (8, 0, 0, False)), 1.0) is None


def test_samples_that_moved_there_keep_a_replica():
    assert released(view((8, 0, 3, True), (8, 5, 5, True)), 1.0) is None


def test_between_two_turns_a_replica_is_not_done():
    assert released(view((8, 2, 0, True), (8, 5, 5, True)), 1.0) is None


def test_before_all_samples_are_assigned_nothing_is_given_up():
    assert released(view((0, 0, 0, True), (0, 0, 0, True), expected=16), 0.5) is None
    assert released(view((8, 0, 0, True), (4, 4, 4, True), expected=16), 0.5) is None


@pytest.mark.parametrize(("cut", "expected"), [(0.75, Migration((0,))), (0.8, None), (1.0, None)])
def test_a_replica_that_is_nearly_done_hands_on_its_rest(cut, expected):
    assert released(view((8, 6, 6, True), (8, 2, 2, True)), cut) == expected


def test_where_the_others_have_no_room_it_keeps_them():
    assert released(view((8, 7, 7, True), (8, 2, 2, True)), 0.75) is None
    assert released(view((8, 7, 7, True), (8, 2, 2, True), (8, 7, 7, True)), 0.75) == Migration((0, 2))


def test_a_replica_with_more_samples_than_it_has_room_for_takes_no_room_from_others():
    crowded = view((10, 5, 5, True), (8, 8, 8, True), (8, 5, 5, True))
    first, second, third = crowded.replicas
    three = (first, replace(second, slots=2), replace(third, slots=10))
    assert released(replace(crowded, replicas=three), 0.5) == Migration((1, 2))
    assert released(replace(crowded, replicas=(first, second, replace(third, slots=9))), 0.5) is None


def test_samples_between_two_turns_need_room_too():
    # Two of the first replica's seven samples are in a tool, and so are both of the second one's.
    assert released(view((8, 7, 5, True), (8, 2, 0, True)), 0.75) is None
    assert without_room(view((8, 7, 5, True), (8, 2, 0, True)), 0.75)
    assert released(view((8, 6, 0, True), (8, 2, 0, True)), 0.75) == Migration((0,))


def test_samples_that_moved_earlier_need_room_wherever_they_run():
    assert released(view((8, 4, 4, True), (8, 2, 2, True), (8, 3, 0, False)), 0.75) is None
    assert released(view((8, 4, 4, True), (8, 2, 2, True), (8, 2, 0, False)), 0.75) == Migration((0,))


def test_a_replica_that_keeps_its_requests_for_want_of_room_is_told():
    full = view((8, 7, 7, True), (8, 2, 2, True))
    assert without_room(full, 0.75)
    assert not without_room(full, 0.8), "it is not nearly done"
    assert not without_room(full, 1.0)
    assert not without_room(view((8, 6, 6, True), (8, 2, 2, True)), 0.75), "it moves"
    assert not without_room(view((8, 0, 0, False), (8, 2, 2, True)), 0.75), "there is nowhere to go"
    assert not without_room(view((8, 7, 7, True), (8, 2, 2, True), expected=24), 0.75), "more prompts are to come"


def test_a_replica_with_requests_that_cannot_move_keeps_them():
    assert released(view((8, 4, 4, True), (8, 2, 2, True), unmovable=[0, 1]), 0.75) is None
    assert not without_room(view((8, 7, 7, True), (8, 2, 2, True), unmovable=[0, 1]), 0.75)
    # The next one that is nearly done goes in its place; one that is done goes in any case.
    three = view((8, 4, 4, True), (8, 1, 1, True), (8, 2, 2, True), unmovable=[0, 1])
    assert released(three, 0.75) == Migration((0, 1))
    assert released(view((8, 4, 4, True), (8, 0, 0, True), unmovable=[4]), 0.75) == Migration((0,))


def test_a_migration_names_the_key_that_asked_for_it():
    assert released(view((8, 0, 0, True), (8, 5, 5, True)), 1.0).cause == "fuse.elastic.release"
    assert released(view((8, 6, 6, True), (8, 2, 2, True)), 0.75).cause == "fuse.elastic.cut_fraction"


def test_the_one_with_least_to_move_goes_first():
    assert released(view((8, 2, 2, True), (8, 1, 1, True), (8, 8, 4, True)), 0.75) == Migration((0, 2))


def test_a_rest_that_has_nowhere_to_go_is_said_once_a_step(caplog):
    crowded = view((8, 2, 2, True), (8, 7, 7, True))
    release = Release(ElasticConfig(release=True, cut_fraction=0.5))
    with caplog.at_level("INFO"):
        assert [release.decide(replace(crowded, replicas=full(crowded))) for _ in range(3)] == [None] * 3
    assert (release.without_room, len(caplog.messages)) == (True, 1)


def test_where_it_is_off_nothing_is_released():
    assert Release(ElasticConfig()).decide(view((8, 0, 0, True), (8, 5, 5, True))) is None
