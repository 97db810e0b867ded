"""Samples on lanes and ranks: alone, or with the others of their prompt."""

import random
from collections import Counter

import pytest

from verl_fuse.host.inference.micro_groups import packed, share, spread


def prompt(key: str) -> str:
    return key.split("_")[0]


# Prompts of three samples, whose lengths have nothing to do with their prompts.
LENGTHS = {f"{name}_{number}": length for (name, number), length in zip(
    [(name, number) for number in range(3) for name in "abcd"], [50, 10, 40, 20, 12, 35, 18, 44, 5, 9, 31, 27],
    strict=True,
)}  # fmt: skip


PROMPTS = {key: (prompt(key), 4) for key in LENGTHS}


def test_samples_alone_go_one_by_one_the_longest_first():
    found = share(LENGTHS, {"slice 0": 1, "slice 1": 1})
    assert found["slice 0"][:2] == ["a_0", "b_1"]
    tokens = [sum(LENGTHS[key] for key in keys) for keys in found.values()]
    assert abs(tokens[0] - tokens[1]) <= 9
    assert spread(["a_0", "b_0", "c_0", "d_0"], LENGTHS, 2) == ["a_0", "d_0", "c_0", "b_0"]


@pytest.mark.parametrize(("multiple", "whole"), [(1, True), (3, True), (2, False)])
def test_samples_of_a_prompt_go_to_one_lane_as_far_as_its_multiple_lets_them(multiple, whole):
    found = share(LENGTHS, {"slice 0": multiple, "slice 1": multiple}, PROMPTS)
    assert sorted(key for keys in found.values() for key in keys) == sorted(LENGTHS)
    assert all(len(keys) % multiple == 0 for keys in found.values())
    lanes = Counter(name for keys in found.values() for name in {prompt(key) for key in keys})
    assert (set(lanes.values()) == {1}) is whole
    assert found["slice 0"][:2] == ["a_0", "a_1"]


def test_no_lane_waits_for_a_prompt_that_is_larger_than_its_share():
    one = {f"a_{number}": 10 for number in range(16)}
    lanes = {f"slice {number}": 1 for number in range(4)}
    assert sorted(map(len, share(one, lanes, {key: ("a", 4) for key in one}).values())) == [4, 4, 4, 4]
    # Nine of ten tokens are of one prompt's samples.
    two = {f"a_{number}": 90 for number in range(16)} | {f"b_{number}": 10 for number in range(16)}
    found = share(two, dict.fromkeys(lanes, 2), {key: (prompt(key), 4) for key in two})
    assert max(sum(two[key] for key in keys) for keys in found.values()) <= 1.5 * sum(two.values()) / 4


def test_what_makes_up_no_multiple_is_left_out():
    found = share({key: LENGTHS[key] for key in ("a_0", "a_1", "b_0")}, {"slice 0": 2}, PROMPTS)
    assert found == {"slice 0": ["a_0", "a_1"]}
    assert share({"a_0": 1}, {"slice 0": 2}, PROMPTS) == {}


def test_ranks_get_prompts_whole_where_none_of_them_computes_more_for_it():
    equal = {key: 30 + place for place, key in enumerate(LENGTHS)}
    keys = list(equal)
    random.Random(1).shuffle(keys)
    found = spread(keys, equal, 2, {key: (prompt(key), 25) for key in keys})
    assert sorted(found) == sorted(keys)
    assert all(len({prompt(key) for key in half}) == 2 for half in (found[:6], found[6:]))
    # Two prompts, one with the long responses.
    uneven = {f"a_{number}": 82 for number in range(8)} | {f"b_{number}": 7 for number in range(8)}
    short = {key: (prompt(key), 4) for key in uneven}
    assert spread(list(uneven), uneven, 2, short) == spread(list(uneven), uneven, 2)


def test_a_group_without_room_is_cut_where_most_is_free():
    groups = [[1] * 5, [2] * 2, [3] * 1]
    found = packed(groups, 2, 4, len)
    assert sorted(map(sorted, found)) == [[1, 1, 1, 1], [1, 2, 2, 3]]
    with pytest.raises(AssertionError, match="more rows than places"):
        packed(groups, 2, 3, len)
