"""Jobs in one thread whose calls are made together; shows the invariants in the docstring of
plugins/verl_fuse_pipeline/joint.py."""

from contextlib import contextmanager

import pytest

from verl_fuse.errors import FuseError

pytest.importorskip("greenlet")
from verl_fuse_pipeline.joint import JointCalls


def test_jobs_run_to_their_calls_and_go_on_with_their_own_results():
    log = []

    def make(requests):
        log.append(dict(requests))
        return {name: request * 10 for name, request in requests.items()}

    calls = JointCalls(make)

    def job(name, numbers):
        return [calls.call(number) for number in numbers]

    assert calls.run({"a": lambda: job("a", [1, 2, 3]), "b": lambda: job("b", [4])}) == {"a": [10, 20, 30], "b": [40]}
    assert log == [{"a": 1, "b": 4}, {"a": 2}, {"a": 3}]


def test_a_job_without_calls_and_no_job_at_all():
    calls = JointCalls(lambda requests: pytest.fail("there is no call"))
    assert calls.run({"a": lambda: 7}) == {"a": 7}
    assert calls.run({}) == {}


def test_every_job_runs_in_its_context_and_the_calls_outside_of_them():
    inside = []

    def context(name):
        @contextmanager
        def entered():
            inside.append(name)
            yield
            inside.pop()

        return entered

    def make(requests):
        assert inside == []
        return requests

    calls = JointCalls(make, {"a": context("a"), "b": context("b")})

    def job(name):
        assert inside == [name]
        calls.call(name)
        assert inside == [name]
        return list(inside)

    assert calls.run({"a": lambda: job("a"), "b": lambda: job("b")}) == {"a": ["a"], "b": ["b"]}


@pytest.mark.parametrize("fails", ["job", "call"])
def test_an_error_ends_the_jobs_that_wait(fails):
    ended = []

    def make(requests):
        raise KeyError("call")

    calls = JointCalls(make)

    def waits():
        try:
            calls.call(1)
        finally:
            ended.append("waits")

    def breaks():
        if fails == "job":
            raise KeyError("job")
        calls.call(2)

    with pytest.raises(KeyError, match=fails):
        calls.run({"a": waits, "b": breaks})
    assert ended == ["waits"]


def test_a_call_outside_the_jobs_is_refused():
    with pytest.raises(FuseError, match="outside the jobs"):
        JointCalls(lambda requests: requests).call(1)
