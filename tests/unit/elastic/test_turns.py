import pytest

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse_elastic.assignment import assign
from verl_fuse_elastic.turns import GeneratedShares

MATH, SEARCH = Prompt("m", "km", "math", 2), Prompt("s", "ks", "search", 2)
PROMPTS = {"m": MATH, "s": SEARCH}
LENGTHS = {"m": [100, 300], "s": [100, 300]}


def learned(**generated: int) -> GeneratedShares:
    shares = GeneratedShares()
    shares.learn(generated, PROMPTS, LENGTHS)
    return shares


def predicted(source: str, tokens: float, upper: float, uid: str = "u") -> Prompt:
    return Prompt(uid, uid, source, 1, Prediction(tokens, upper))


def test_responses_of_one_turn_keep_their_predictions_to_the_bit():
    prompt = predicted("math", 1 / 3, 2 / 3)
    assert GeneratedShares().decoded([prompt]) == [prompt]
    assert learned(m=400, s=400).decoded([prompt]) == [prompt]


def test_a_data_set_has_the_share_of_its_own_samples_and_the_newest_step_counts_half():
    shares = learned(m=400, s=100)
    assert shares.decoded([predicted("search", 40.0, 80.0)]) == [predicted("search", 10.0, 20.0)]
    assert shares.of("math") == 1.0
    shares.learn({"m": 400, "s": 200}, PROMPTS, LENGTHS)
    assert shares.of("search") == pytest.approx(0.375)


def test_a_data_set_not_seen_yet_has_the_mean_share_and_unknown_lengths_stay_unknown():
    assert learned(m=400, s=200).of("code") == pytest.approx(0.75)
    assert learned(m=400, s=200).decoded([SEARCH]) == [SEARCH]


def test_a_step_whose_requests_do_not_know_their_prompt_teaches_nothing():
    shares = GeneratedShares()
    shares.learn({"": 800}, PROMPTS, LENGTHS)
    assert shares.by_source == {}


def test_long_answers_of_a_tool_are_no_reason_to_give_a_prompt_a_replica_of_its_own():
    """Two prompts of 300 tokens that a tool wrote, and two of 100 generated ones."""
    prompts = [predicted("search", 300.0, 300.0, f"s{n}") for n in range(2)]
    prompts += [predicted("math", 100.0, 100.0, f"m{n}") for n in range(2)]
    blind = assign(prompts, [0, 1], slots=1)
    shares = learned(m=400, s=4)
    seeing = assign(shares.decoded(prompts), [0, 1], slots=1)
    assert blind["s0"] != blind["s1"]
    assert seeing["m0"] != seeing["m1"]
