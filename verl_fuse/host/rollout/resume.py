"""Puts one response together from the parts that several replicas generated.

A replica that leaves the rollout returns its tokens as an aborted partial answer; a request with prompt + tokens so far
asks for the rest. The weights do not change within a step, so the whole is one on-policy sample (verl's
FullyAsyncLLMServerClient joins parts across weight versions).

Invariants (tests/integration/test_resume.py):
- tokens and log-probs are the parts' in order, one log-prob per token;
- the parts share the budget the server would have given the whole request; no other sampling parameter changes;
- a request with a parameter whose meaning depends on where the output starts has obstacles: its response is never put
together from parts;
- an answer with another number of log-probs than tokens, or with a log-prob that is no number, is garbage.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import ABORTED

# Parameters with the same meaning for a part and for the whole: each looks at one token, or at prompt and output alike
# (repetition_penalty). The engine starts all others anew with a part: it looks for stop strings in the text of the
# part, counts presence and frequency of the part's tokens, draws
# the first random numbers of a seed once more, and takes the part for the beginning of a structured output.
_RESUMABLE = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logprobs",
        "ignore_eos",
        "stop_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "detokenize",
        "max_tokens",
        "max_new_tokens",
        "min_tokens",
    ]
)
# Values that switch a parameter off; vLLM's seed 0 is a seed, and vLLM gives one answer anyway.
_OFF: Mapping[str, tuple] = {"seed": (None, -1), "n": (None, 1)}
_OFF_ELSE = (None, 0, 0.0, "", [], (), {})


def obstacles(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for which a request cannot go on at another replica, with their values; empty for a request
    that can."""
    return {
        key: value
        for key, value in sampling_params.items()
        if key not in _RESUMABLE and value not in _OFF.get(key, _OFF_ELSE)
    }


def token_budget(sampling_params: Mapping[str, Any], prompt_tokens: int, rollout: Any) -> int:
    """Return the most tokens that the server would generate for the whole request (verl's vLLM server, `generate`)."""
    for key in ("max_tokens", "max_new_tokens"):
        if sampling_params.get(key) is not None:
            return max(1, int(sampling_params[key]))
    return max(1, min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens))


def remaining_params(sampling_params: Mapping[str, Any], budget: int, generated: int) -> dict[str, Any]:
    """Return the sampling parameters for the rest of a request without obstacles, which has `generated` tokens."""
    rest = {key: value for key, value in sampling_params.items() if key != "max_new_tokens"}
    rest["max_tokens"] = budget - generated
    if rest.get("min_tokens"):
        rest["min_tokens"] = max(0, rest["min_tokens"] - generated)
    return rest


def garbage(output: TokenOutput) -> str | None:
    """Return the reason why this cannot be an engine's answer, or None: log-probs, where there are any, must be one
    number per token."""
    if output.log_probs is None:
        return None
    if len(output.log_probs) != len(output.token_ids):
        return f"{len(output.token_ids)} tokens but {len(output.log_probs)} log-probs"
    strange = next((value for value in output.log_probs if not math.isfinite(value)), None)
    return None if strange is None else f"a log-prob of {strange}"


def merge(parts: Sequence[TokenOutput]) -> TokenOutput:
    """Return the response that the parts make up, equal to the response of one request."""
    token_ids = [token for part in parts for token in part.token_ids]
    log_probs = [value for part in parts for value in part.log_probs or ()]
    if log_probs and len(log_probs) != len(token_ids):
        raise FuseError(f"a response in {len(parts)} parts has {len(token_ids)} tokens but {len(log_probs)} log-probs")
    first, last = parts[0], parts[-1]
    preempted = [part.num_preempted for part in parts if part.num_preempted is not None]
    extra = {
        **last.extra_fields,
        "min_global_steps": first.extra_fields.get("global_steps"),
        "max_global_steps": last.extra_fields.get("global_steps"),
        "num_cached_tokens": first.extra_fields.get("num_cached_tokens"),
    }
    return TokenOutput(
        token_ids=token_ids,
        log_probs=log_probs or None,
        routed_experts=_routed_experts(parts),
        stop_reason="completed" if last.stop_reason in ABORTED else last.stop_reason,
        num_preempted=sum(preempted) if preempted else None,
        extra_fields=extra,
    )


def _routed_experts(parts: Sequence[TokenOutput]) -> Any:
    """Return the rows of the first part, then of every later part the rows of its own tokens: the rows before them
    repeat earlier parts."""
    routed: Any = None
    for part in parts:
        if part.routed_experts is not None and part.token_ids:
            new = part.routed_experts if routed is None else part.routed_experts[-len(part.token_ids) :]
            routed = new if routed is None else np.concatenate([routed, new])
    return routed
