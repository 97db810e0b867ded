"""vLLM's scheduler, made exact for what a single request may ask for beside drafts.

Stop strings: vLLM looks for them once a pass, in the text of all tokens that the pass brought, and a sample keeps the
tokens that were accepted behind one. Told one by one, each token is looked at as if it were a pass of its own: what
follows the one that completes a stop string belongs to a request that has ended, and is dropped.

`min_tokens`: vLLM keeps the last token of a pass that began below them from ending the sample, also where drafts have
brought it to them. Drafts end before.

A seed, a budget of thinking tokens: such a request gets no drafts. Its samples would depend on them; that the
budget is kept was not shown.

Invariants (tests/integration/test_speculation.py):
- a sample, its log-probs included, ends where it would end with one token a pass;
- a request with a seed gets the same sample with and without drafts for the others.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class TokenwiseScheduler(Scheduler):
    """The class that engines with drafts schedule by (`scheduler_cls`)."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        # Requests that end in this pass are gone afterwards.
        stopping = {name for name in scheduler_output.num_scheduled_tokens if self._may_stop(name)}
        found = super().update_from_output(scheduler_output, model_runner_output)
        if stopping:
            for told in found.values():
                told.outputs = [
                    one
                    for output in told.outputs
                    for one in (tokenwise(output) if output.request_id in stopping else (output,))
                ]
        return found

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for name in draft_token_ids.req_ids:
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids and (most := most_drafts(request)) is not None:
                request.spec_token_ids = request.spec_token_ids[:most]

    def _may_stop(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is not None and request.sampling_params is not None and bool(request.sampling_params.stop)


def most_drafts(request: Any) -> int | None:
    """How many tokens may be drafted for a request at most; None where any number may."""
    params = request.sampling_params
    if params is None:
        return None
    if params.seed is not None or params.thinking_token_budget is not None:
        return 0
    missing = params.min_tokens - request.num_output_tokens
    return missing - 1 if missing > 0 else None


def tokenwise(output: Any) -> Iterator[Any]:
    """An EngineCoreOutput as one for each of its tokens; the last one says how the request ended, if it did."""
    count = len(output.new_token_ids)
    if count < 2:
        yield output
        return
    for place, token in enumerate(output.new_token_ids):
        one = copy(output)
        one.new_token_ids = [token]
        if output.new_logprobs is not None:
            one.new_logprobs = output.new_logprobs.slice_request(place, 1)
        if place > 0:
            one.new_prompt_logprobs_tensors = one.events = None
        if place < count - 1:
            one.finish_reason = one.stop_reason = None
        yield one
