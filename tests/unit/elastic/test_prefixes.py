import pytest

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse_elastic.prefixes import prefill_metrics


def request(prompt, tokens, cached, name="request", **args):
    known = {} if cached is None else {"cached_tokens": cached}
    uid = {} if prompt is None else {"prompt": prompt}
    return Span(name, "replica 0", "generate", 0.0, 1.0, {"prompt_tokens": tokens, **known, **uid, **args})


def measured(*spans):
    return prefill_metrics(Timeline("run", 1, 0.0, 2.0, spans))


def test_a_prefix_computed_once_counts_once():
    found = measured(request("a", 100, 0), *[request("a", 100, 96)] * 3, request("b", 50, 0))
    assert found["fuse/prefilled_prompt_tokens"] == 100 + 3 * 4 + 50
    assert found["fuse/prefills_per_prompt_token"] == pytest.approx(162 / 150)


def test_the_warming_request_counts_as_what_it_computes():
    found = measured(request("a", 100, 0, "warm"), request("a", 100, 96), request("a", 100, 96))
    assert found == {
        "fuse/prefilled_prompt_tokens": 108.0,
        "fuse/prefills_per_prompt_token": pytest.approx(1.08),
        "fuse/warmed_prefixes": 1.0,
    }


def test_later_turns_moved_parts_and_requests_of_nobody_are_left_out():
    others = [
        request("a", 180, 96),
        request("a", 130, 0, resumed_tokens=30),
        request(None, 70, 0),
        request("a", 100, None),
    ]
    assert measured(request("a", 100, 0), *others)["fuse/prefills_per_prompt_token"] == 1.0


def test_an_engine_that_does_not_count_is_not_guessed():
    assert measured(request("a", 100, None)) == {}
