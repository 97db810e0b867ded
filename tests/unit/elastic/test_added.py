import math
import random

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.added import add


def prompt(uid: str, tokens: float, samples: int = 4, upper: float | None = None) -> Prompt:
    return Prompt(uid, uid, "math", samples, Prediction(tokens, upper or tokens))


def test_a_prompt_goes_where_least_is_left():
    running = {0: [prompt("a", 100), prompt("b", 10)], 1: [prompt("c", 100)], 2: [prompt("d", 100, samples=1)]}
    assert add([prompt("new", 50)], running, slots=64) == {"new": 2}
    assert add([prompt("new", 50)], {**running, 2: [prompt("d", 100, samples=8)]}, slots=64) == {"new": 1}


def test_many_are_balanced_the_longest_first():
    new = [prompt(f"n{tokens}", tokens) for tokens in (10, 20, 30, 60)]
    assert add(new, {0: [], 1: []}, slots=64) == {"n60": 0, "n30": 1, "n20": 1, "n10": 1}


def test_by_the_measured_cost_a_short_one_hides_behind_a_long_one():
    running = {0: [prompt("long", 1000, samples=1)], 1: [prompt("short", 100, samples=4)]}
    cost = DecodeCost(1.0, 0.0)
    assert add([prompt("new", 90)], running, slots=64) == {"new": 1}
    assert add([prompt("new", 900, samples=1)], running, 64, cost) == {"new": 1}
    # Both are done when their longest is: fewer tokens decide.
    assert add([prompt("new", 50, samples=1)], {0: [prompt("x", 60)], 1: [prompt("y", 60, samples=2)]}, 64, cost) == {
        "new": 1
    }


def test_no_response_is_longer_than_the_limit_and_none_is_known_before_the_first_step():
    running = {0: [prompt("a", 80, samples=2, upper=5000)], 1: [prompt("b", 90, samples=2)]}
    cost = DecodeCost(1.0, 0.0)
    assert add([prompt("new", 1)], running, 64, cost) == {"new": 1}
    assert add([prompt("new", 1)], running, 64, cost, limit=85) == {"new": 0}
    unknown = [Prompt(uid, uid, "math", 4) for uid in "abcd"]
    assert add(unknown, {0: [], 1: []}, slots=64) == {"a": 0, "b": 1, "c": 0, "d": 1}


def test_every_prompt_gets_a_replica_there_is():
    rng = random.Random(0)
    for _ in range(200):
        ranks = rng.sample(range(9), rng.randint(1, 5))
        running = {r: [prompt(f"r{r}-{n}", rng.uniform(1, 300)) for n in range(rng.randint(0, 4))] for r in ranks}
        new = [prompt(f"n{n}", rng.uniform(0, 300), rng.randint(1, 8)) for n in range(rng.randint(0, 9))]
        homes = add(
            new, running, rng.randint(1, 64), DecodeCost(rng.random(), rng.random()), rng.choice([math.inf, 200])
        )
        assert homes.keys() == {p.uid for p in new}
        assert set(homes.values()) <= set(ranks)
