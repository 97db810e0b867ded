"""Extend vLLM's scheduler so that the demands of a single request are met exactly, beside drafts.

Stop strings: vLLM looks for stop strings once a pass, in the text of all tokens that the pass brought, and a sample
keeps the tokens that were accepted behind a stop string. This scheduler tells the tokens one by one, so that vLLM looks
at each token as if the token were a pass of its own: tokens after a completed stop string belong to a request that has
ended, and are dropped.

`min_tokens`: vLLM keeps the last token of a pass that began below `min_tokens` from ending the sample, also where
drafts have brought the sample to `min_tokens`. Drafts end before that token.

A seed, a budget of thinking tokens: such a request gets no drafts. With a seed its samples would depend on the drafts;
nobody showed that the budget is kept.

Invariants (tests/integration/test_speculation.py):
- a sample, its log-probs included, ends where the sample would end with one token a pass;
- a request with a seed gets the same sample with and without drafts for the others.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class TokenwiseScheduler(Scheduler):
    """The scheduler of engines with drafts (`scheduler_cls`)."""

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
    """Return how many tokens may be drafted for a request at most; None where any number may."""
    params = request.sampling_params
    if params is None:
        return None
    if params.seed is not None or params.thinking_token_budget is not None:
        return 0
    missing = params.min_tokens - request.num_output_tokens
    return missing - 1 if missing > 0 else None


def tokenwise(output: Any) -> Iterator[Any]:
    """Yield an EngineCoreOutput as one output for each of its tokens; the last output says how the request ended, if
    the request ended."""
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
