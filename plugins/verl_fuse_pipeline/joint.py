"""Runs jobs side by side in one thread: each runs until it makes a call, the calls are made together, and every job
goes on with its own result.

A job's code is not changed for it: it calls `JointCalls.call` where it would have made the call itself.

Invariants (tests/unit/host/test_joint.py):
- one job runs at a time, in the order of the jobs, and each one inside its own context;
- calls are made together as soon as every job that has not ended waits in one; a job that is left makes its calls
  alone;
- an error of a job, or of the calls, ends the other jobs where they wait, their contexts and `finally` blocks included,
  and is raised.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from verl_fuse.errors import FuseError

Request = TypeVar("Request")
Result = TypeVar("Result")
Context = Callable[[], AbstractContextManager[Any]]


class JointCalls(Generic[Request, Result]):
    """`make` answers the requests of all waiting jobs, by job name; `contexts` are entered whenever the job of that
    name runs."""

    def __init__(
        self, make: Callable[[dict[str, Request]], Mapping[str, Result]], contexts: Mapping[str, Context] | None = None
    ) -> None:
        self._make = make
        self._contexts = contexts or {}
        self._jobs: dict[str, greenlet] = {}

    def call(self, request: Request) -> Result:
        """Wait, within a job, until the calls are made, and return this job's result."""
        job = getcurrent()
        if job not in self._jobs.values() or job.parent is None:
            raise FuseError("a joint call outside the jobs that make them")
        return job.parent.switch(request)

    def run(self, jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run the jobs to their ends; return the result of each job."""
        self._jobs = {name: greenlet(job) for name, job in jobs.items()}
        given: dict[str, Any] = {}
        returned: dict[str, Any] = {}
        try:
            while len(returned) < len(jobs):
                requests: dict[str, Request] = {}
                for name, job in self._jobs.items():
                    if name in returned:
                        continue
                    with self._contexts.get(name, nullcontext)():
                        answer = job.switch(*given.pop(name, ()))
                    (returned if job.dead else requests)[name] = answer
                if requests:
                    given = {name: (result,) for name, result in self._make(requests).items()}
            return returned
        finally:
            for name, job in self._jobs.items():
                if job:  # started, and not at its end
                    with self._contexts.get(name, nullcontext)():
                        job.throw(GreenletExit)
            self._jobs = {}
