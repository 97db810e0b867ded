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


def test_the_type_of_a_batch_does_not_matter():
    assert PromptDigest.of(np.array([1, 2], np.int64)) == PromptDigest.of(tokens(1, 2))
