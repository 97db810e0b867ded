import random

import pytest

from verl_fuse.host.rollout.finished import Finished
from verl_fuse.host.rollout.lengths import LengthTotals
from verl_fuse.spec.trajectory import TrajectoryKey


def tag(response=7, status="success"):
    return {"status": status, "prompt_len": 5, "response_len": response}


def counted(listed, taken=()):
    """Return the result of a new count."""
    tags = {key: tag for key, tag in listed.items() if tag["status"] == "success"}
    samples = {TrajectoryKey.parse(key).sample for key in tags}
    lengths = LengthTotals.of([(tag["prompt_len"], tag["response_len"]) for tag in tags.values()])
    return set(tags), len(samples), lengths, {key for key in tags if key not in taken}


def kept(finished):
    return set(finished.tags), finished.samples, finished.lengths, {sample.key for sample in finished.ready}


@pytest.mark.parametrize("seed", range(20))
def test_at_every_moment_it_is_what_counting_anew_finds(seed):
    rng = random.Random(seed)
    finished, listed, taken = Finished(), {}, set()
    for _ in range(60):
        match rng.random():
            case chance if chance < 0.6:
                key = f"u{rng.randrange(4)}_{rng.randrange(3)}_{rng.randrange(2)}"
                listed.setdefault(key, tag(rng.randrange(1, 50), rng.choice(["success", "writing"])))
            case chance if chance < 0.75:
                # The data of what was listed are there.
                listed = {key: {**tag, "status": "success"} for key, tag in listed.items()}
            case chance if chance < 0.9 and finished.ready:
                chosen = [rng.choice(finished.ready).key]
                finished.take(chosen)
                taken.update(chosen)
            case _:
                uid = f"u{rng.randrange(4)}_"
                listed = {key: tag for key, tag in listed.items() if not key.startswith(uid)}
                taken = {key for key in taken if not key.startswith(uid)}
        before, seen = dict(finished.counts), len(finished.changed)
        finished.update(listed)
        assert kept(finished) == counted(listed, taken)
        changed = {uid for uid, count in finished.counts.items() if count != before.get(uid, 0)}
        assert changed <= set(finished.changed[seen:])
        for uid in ("u0", "u3"):
            found = {TrajectoryKey.parse(key).sample for key in finished.tags if key.startswith(f"{uid}_")}
            assert finished.counts[uid] == len(found)


def test_samples_are_ready_in_the_order_in_which_they_were_seen():
    finished = Finished()
    finished.update({"b_0_0": tag(3), "c_0_0": tag(status="writing")})
    # TransferQueue lists the new one first, and what was listed before its data in its old place.
    finished.update({"a_0_0": tag(9), "b_0_0": tag(3), "c_0_0": tag(4)})
    assert [sample.key for sample in finished.ready] == ["b_0_0", "a_0_0", "c_0_0"]
    finished.take(["a_0_0"])
    assert [sample.key for sample in finished.ready] == ["b_0_0", "c_0_0"]
    assert [sample.key for sample in finished.besides({"b_0_0"})] == ["a_0_0", "c_0_0"], "whatever other lanes took"
    assert len(finished) == 3


def test_several_trajectories_of_a_session_are_one_sample():
    finished = Finished()
    finished.update({"a_0_0": tag(), "a_0_1": tag(), "a_1_0": tag()})
    assert (finished.samples, finished.counts["a"], len(finished)) == (2, 2, 3)


def test_a_discarded_group_is_forgotten_with_its_longest_response():
    finished = Finished()
    finished.update({"a_0_0": tag(90), "b_0_0": tag(8)})
    assert finished.lengths == LengthTotals(2, 10, 98, 90)
    finished.update({"b_0_0": tag(8)})
    assert finished.lengths == LengthTotals(1, 5, 8, 8)
    assert finished.counts["a"] == 0
