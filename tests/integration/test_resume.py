"""A response in parts, put together: verl's own TokenOutput, no engine."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from verl_fuse.errors import FuseError

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from verl.workers.rollout.replica import TokenOutput

    from verl_fuse.host.rollout.resume import garbage, merge, obstacles, remaining_params, token_budget

pytestmark = pytest.mark.integration

ROLLOUT = SimpleNamespace(prompt_length=16, response_length=100)
# What verl's agent loop sends.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.mark.parametrize(
    ("sampling", "prompt", "budget"),
    [
        (SAMPLING, 10, 100),
        (SAMPLING, 40, 76),
        ({**SAMPLING, "max_tokens": 30}, 40, 30),
        ({**SAMPLING, "max_new_tokens": 30}, 10, 30),
        ({**SAMPLING, "max_tokens": None}, 10, 100),
        # The server gives one token at least.
        (SAMPLING, 115, 1),
        (SAMPLING, 116, 1),
        (SAMPLING, 130, 1),
        ({**SAMPLING, "max_tokens": 0}, 10, 1),
    ],
)
def test_the_budget_is_what_the_server_gives_a_whole_request(sampling, prompt, budget):
    assert token_budget(sampling, prompt, ROLLOUT) == budget


def test_the_rest_of_a_request_has_the_rest_of_its_budget_and_nothing_else_changes():
    asked = {**SAMPLING, "max_new_tokens": 30, "min_tokens": 5, "stop_token_ids": [7], "ignore_eos": True}
    unchanged = {**SAMPLING, "stop_token_ids": [7], "ignore_eos": True}
    assert remaining_params(asked, budget=30, generated=3) == {**unchanged, "max_tokens": 27, "min_tokens": 2}
    assert remaining_params(asked, budget=30, generated=12) == {**unchanged, "max_tokens": 18, "min_tokens": 0}
    assert asked["max_new_tokens"] == 30, "the caller uses its parameters again"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop", ["</s>"]),
        ("stop", "."),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("seed", 3),
        ("seed", 0),
        ("structured_outputs", {"regex": "a"}),
        ("bad_words", ["b"]),
        ("a_parameter_of_tomorrow", 1),
    ],
)
def test_a_parameter_that_depends_on_where_the_output_starts_is_an_obstacle(key, value):
    assert obstacles({**SAMPLING, "include_stop_str_in_output": True, key: value}) == {key: value}


def test_parameters_that_are_switched_off_are_no_hindrance():
    off = {"stop": None, "presence_penalty": 0.0, "frequency_penalty": 0, "seed": None, "bad_words": [], "n": 1}
    assert obstacles({**SAMPLING, **off, "stop_token_ids": [], "stop": ""}) == {}
    assert obstacles({**SAMPLING, "seed": -1, "stop_token_ids": [3], "min_tokens": 4, "logit_bias": {1: 2.0}}) == {}


def part(tokens, log_probs="same", stop_reason="aborted", **extra):
    values = [-token / 10 for token in tokens] if log_probs == "same" else log_probs
    return TokenOutput(
        token_ids=tokens, log_probs=values, stop_reason=stop_reason, extra_fields={"global_steps": 4, **extra}
    )


def test_parts_make_up_one_response():
    parts = [
        part([1, 2], num_cached_tokens=5),
        part([], log_probs=None),
        part([3], stop_reason="completed", num_cached_tokens=9),
    ]
    whole = merge(parts)
    assert whole.token_ids == [1, 2, 3]
    assert whole.log_probs == [-0.1, -0.2, -0.3]
    assert whole.stop_reason == "completed"
    assert whole.extra_fields == {
        "global_steps": 4,
        "min_global_steps": 4,
        "max_global_steps": 4,
        "num_cached_tokens": 5,
    }


def test_parts_of_two_weights_versions_show_both():
    extra = merge([part([1], global_steps=3), part([2], stop_reason="completed", global_steps=4)]).extra_fields
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (3, 4)


def test_a_response_whose_budget_ended_with_the_abort_is_complete():
    assert merge([part([1, 2])]).stop_reason == "completed"


def test_a_part_without_log_probs_among_parts_with_them_is_an_error():
    with pytest.raises(FuseError, match="2 parts has 3 tokens but 2 log-probs"):
        merge([part([1, 2]), part([3], log_probs=None, stop_reason="completed")])


def test_without_log_probs_there_are_none():
    assert merge([part([1], log_probs=None), part([2], log_probs=None, stop_reason="completed")]).log_probs is None


def test_preemptions_add_up_and_routed_experts_of_repeated_tokens_are_left_out():
    first, last = part([1, 2]), part([3], stop_reason="completed")
    first.num_preempted, last.num_preempted = 1, 2
    # Rows: two of the prompt and two of the output; then the same four and one more.
    first.routed_experts, last.routed_experts = np.arange(4)[:, None], np.arange(5)[:, None] + 10
    whole = merge([first, last])
    assert whole.num_preempted == 3
    assert whole.routed_experts.ravel().tolist() == [0, 1, 2, 3, 14]


@pytest.mark.parametrize(
    ("log_probs", "fault"),
    [
        ([-0.1], "2 tokens but 1 log-probs"),
        ([-0.1, float("nan")], "a log-prob of nan"),
        ([float("-inf"), -0.1], "a log-prob of -inf"),
        (None, None),
        ([-0.1, -0.2], None),
    ],
)
def test_log_probs_that_cannot_be_an_engine_s_are_garbage(log_probs, fault):
    assert garbage(part([1, 2], log_probs=log_probs)) == fault
