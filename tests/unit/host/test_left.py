import random
from collections import Counter

import pytest

from verl_fuse.host.rollout.finished import Finished
from verl_fuse.host.rollout.left import SamplesLeft
from verl_fuse.spec.prompts import Prediction, Prompt

UIDS = "abcdef"


def tag():
    return {"status": "success", "prompt_len": 5, "response_len": 7}


def prompts(predicted=UIDS):
    return {
        uid: Prompt(uid, uid, "", 2 + place % 3, Prediction(place, 10.0 * place) if uid in predicted else None)
        for place, uid in enumerate(UIDS)
    }


def counted(asked, homes, finished, discarded, ended):
    """Return the result of a new count: by replica the assigned and the unfinished samples, and the mean upper
    prediction."""
    left = {
        uid: 0 if uid in ended else max(0, prompt.samples - finished.counts[uid])
        for uid, prompt in asked.items()
        if uid not in discarded
    }
    assigned, unfinished = Counter(), Counter()
    for uid in left.keys() & homes.keys():
        assigned[homes[uid]] += asked[uid].samples
        unfinished[homes[uid]] += left[uid]
    total = sum(left.values())
    if not total or any(asked[uid].prediction is None for uid in left):
        return left, assigned, unfinished, None
    return left, assigned, unfinished, sum(asked[uid].prediction.upper * count for uid, count in left.items()) / total


@pytest.mark.parametrize("seed", range(20))
def test_at_every_moment_the_counts_are_those_of_a_new_count(seed):
    rng = random.Random(seed)
    asked, homes = prompts(UIDS if seed % 4 else "abcde"), {"a": 0, "b": 0, "c": 1, "d": 2, "e": 0}
    finished, discarded, ended, listed = Finished(), {}, {}, {}
    kept = SamplesLeft(asked, homes)
    for _ in range(40):
        if rng.random() < 0.85:
            listed[f"{rng.choice(UIDS + 'g')}_{rng.randrange(5)}_{rng.randrange(2)}"] = tag()
        else:
            uid = rng.choice(UIDS)
            discarded[uid] = []
            if rng.random() < 0.5:
                listed = {key: one for key, one in listed.items() if key[0] != uid}
        if rng.random() < 0.1:
            ended[rng.choice(UIDS + "g")] = 1
        finished.update(listed)
        kept.look(finished, discarded, ended)
        left, assigned, unfinished, upper = counted(asked, homes, finished, discarded, ended)
        assert {uid: kept.of(uid) for uid in UIDS} == {uid: left.get(uid, 0) for uid in UIDS}
        assert (kept.assigned, kept.unfinished) == (assigned, unfinished)
        assert kept.upper == (None if upper is None else pytest.approx(upper))


def test_another_record_of_finished_samples_begins_anew():
    kept, done = SamplesLeft(prompts(), {"a": 3}), Finished()
    done.update({"a_0_0": tag(), "a_1_0": tag()})
    kept.look(done, {"b": []})
    assert (kept.of("a"), kept.of("b"), kept.unfinished[3]) == (0, 0, 0)
    kept.look(Finished(), {})
    assert (kept.of("a"), kept.of("b"), kept.unfinished[3]) == (2, 3, 2)
