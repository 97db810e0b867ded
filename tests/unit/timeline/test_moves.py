"""Where moved requests came from."""

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.moves import moves


def part(replica: int, start: float, end: float, tokens: int, response: int, resumed: int = 0, **args) -> Span:
    """A request of one prompt that was turned away at its end."""
    told = {"prompt_tokens": tokens, "response_tokens": response, "stop_reason": "aborted", "prompt": "p"} | args
    told |= {"resumed_tokens": resumed} if resumed else {}
    return Span("request", f"replica {replica}", "generate", start, end, told)


def rest(replica: int, start: float, end: float, tokens: int, response: int, resumed: int, **args) -> Span:
    """A request that goes on and finishes."""
    return part(replica, start, end, tokens, response, resumed, stop_reason="completed", **args)


def moved(*spans: Span) -> list[tuple[str, float, str, float]]:
    pairs = moves(Timeline("run", 1, 0.0, 9.0, spans))
    return [(one.track, one.end, other.track, other.start) for one, other in pairs]


def test_a_rest_follows_the_part_whose_tokens_it_goes_on_with():
    long, short = part(0, 0.0, 2.0, 10, 30), part(0, 0.0, 2.0, 10, 5)
    found = moves(Timeline("run", 1, 0.0, 9.0, (long, short, rest(1, 2.1, 4.0, 40, 8, 30))))
    assert [(one.args["response_tokens"], other.track) for one, other in found] == [(30, "replica 1")]


def test_a_request_may_move_twice():
    spans = (part(0, 0.0, 2.0, 10, 30), part(1, 2.0, 3.0, 40, 5, 30), rest(2, 3.0, 4.0, 45, 8, 35))
    assert moved(*spans) == [("replica 0", 2.0, "replica 1", 2.0), ("replica 1", 3.0, "replica 2", 3.0)]


def test_each_part_is_followed_by_one_rest():
    twins = (part(0, 0.0, 2.0, 10, 30), part(0, 0.0, 2.0, 10, 30))
    rests = tuple(rest(1, 2.0 + index, 5.0, 40, 8, 30) for index in range(3))
    assert len(moved(*twins, *rests)) == 2


def test_no_arrow_where_no_part_fits():
    other_prompt = rest(1, 2.0, 4.0, 40, 8, 30, prompt="q")
    too_early, same_replica = rest(1, 1.0, 4.0, 40, 8, 30), rest(0, 2.0, 4.0, 40, 8, 30)
    finished = part(0, 0.0, 2.0, 10, 30, stop_reason="completed")
    for one in (other_prompt, too_early, same_replica):
        assert moved(part(0, 0.0, 2.0, 10, 30), one) == []
    assert moved(finished, rest(1, 2.0, 4.0, 40, 8, 30)) == []
