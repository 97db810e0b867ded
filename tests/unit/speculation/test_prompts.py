"""Shows the invariants of `verl_fuse_speculation.prompts`."""

import numpy as np

from verl_fuse_speculation.prompts import PromptDigest, Prompts


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_samples_of_one_prompt_are_one_group():
    here, there = Prompts(), Prompts()
    prompt = here.find(tokens(1, 2, 3))
    assert prompt == there.find(tokens(1, 2, 3)) == PromptDigest.of(tokens(1, 2, 3))
    assert here.number(prompt) == here.number(here.find(tokens(1, 2, 3))) == 0
    assert here.number(here.find(tokens(1, 2, 4))) == 1


def test_a_sample_that_goes_on_elsewhere_stays_in_its_group():
    prompts = Prompts()
    prompt = PromptDigest.of(tokens(1, 2, 3))
    assert prompts.find(tokens(1, 2, 3, 4, 5)) == PromptDigest.of(tokens(1, 2, 3, 4, 5))
    prompts.number(prompt)
    assert prompts.find(tokens(1, 2, 3, 4, 5)) == prompt
    longer = PromptDigest.of(tokens(1, 2, 3, 4))
    prompts.number(longer)
    assert prompts.find(tokens(1, 2, 3, 4, 5)) == longer
    assert prompts.find(tokens(1, 2)) == PromptDigest.of(tokens(1, 2))


def test_prompts_of_all_lengths_are_found_in_one_walk():
    prompts, rng = Prompts(), np.random.default_rng(0)
    sample = rng.integers(0, 1000, 4000).astype(np.int32)
    for length in range(2, 3000):
        prompts.number(PromptDigest.of(rng.integers(0, 1000, length).astype(np.int32)))
    assert prompts.find(sample) == PromptDigest.of(sample)
    for length in (17, 2050, 2999):
        prompts.number(PromptDigest.of(sample[:length]))
        assert prompts.find(sample) == PromptDigest.of(sample[:length])


def test_a_prompt_that_is_forgotten_is_not_found_and_takes_no_memory():
    prompts = Prompts()
    first, other, longer = (PromptDigest.of(tokens(*found)) for found in ((1, 2), (1, 3), (1, 2, 3)))
    assert [prompts.number(prompt) for prompt in (first, other, longer)] == [0, 1, 2]
    prompts.forget([0, 2])
    assert len(prompts) == 1
    assert prompts.find(tokens(1, 2, 3, 4)) == PromptDigest.of(tokens(1, 2, 3, 4))
    assert prompts.find(tokens(1, 3, 3)) == other
    # A number is not used again: nodes of the group that had it may still be there.
    assert prompts.number(first) == 3
    assert prompts.find(tokens(1, 2, 3)) == first


def test_the_type_of_a_batch_does_not_matter():
    assert PromptDigest.of(np.array([1, 2], np.int64)) == PromptDigest.of(tokens(1, 2))
