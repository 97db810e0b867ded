from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.generated import generated_share, generated_tokens


def request(prompt: str, tokens: int, start: float = 1.0, **args) -> Span:
    found = {"prompt": prompt, "response_tokens": tokens, "stop_reason": "completed", **args}
    return Span("request", "replica 0", "generate", start, start + 1.0, {k: v for k, v in found.items() if v != ""})


def step(*spans: Span) -> Timeline:
    return Timeline("run", 1, 0.0, 99.0, (Span("gen", "step", "stage", 0.0, 9.0), *spans))


def test_tokens_of_all_turns_are_counted_by_prompt():
    spans = [request("a", 5), request("a", 7, 3.0), request("b", 2), request("", 4)]
    assert generated_tokens(step(*spans)) == {"a": 12, "b": 2, "": 4}


def test_requests_of_validation_and_of_a_step_without_generation_are_left_out():
    assert generated_tokens(step(request("a", 5), request("v", 7, 20.0))) == {"a": 5}
    assert generated_tokens(Timeline("run", 1, 0.0, 99.0, (request("v", 7),))) == {}


def test_parts_that_go_on_count_and_parts_that_start_again_do_not():
    moved = [request("a", 5, stop_reason="aborted"), request("a", 3, 2.0)]
    again = [request("b", 5, stop_reason="aborted", unmovable="stop"), request("b", 8, 2.0, unmovable="stop")]
    assert generated_tokens(step(*moved, *again)) == {"a": 8, "b": 8}


def test_a_response_of_one_turn_is_generated_whole():
    assert generated_share(12, 12) == 1.0
    assert generated_share(13, 12) == 1.0, "a last token that the agent cut off"
    assert generated_share(9, 12) == 0.75
    assert [generated_share(*none) for none in ((0, 12), (0, 0))] == [None, None]
