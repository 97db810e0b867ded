"""Timings of made-up replicas, with costs simple enough to be computed by hand."""

import numpy as np

from verl_fuse.simulate.timing import ReplicaTiming


def linear_decode(sequences, tokens):
    return 1.0 + 0.02 * sequences + 1e-4 * tokens


def linear_prefill(sequences: float, tokens: float) -> float:
    return 0.5 + 0.01 * sequences * tokens


def linear_timing(**options) -> ReplicaTiming:
    """Decode 1 + 0.02 batch + 1e-4 context; prefill 0.5 + 0.01 tokens."""
    sizes = {"max_batch": 8, "kv_capacity": 10_000, "longest": 400, "prefill_budget": 10_000, **options}
    return ReplicaTiming.build(linear_decode, linear_prefill, **sizes)


def roofline_decode(sequences, tokens):
    """The larger of reading weights and KV, and of computing; with a launch floor."""
    return 1e-4 + np.maximum(2e-3 + 4e-8 * tokens, 2e-5 * sequences + 1e-9 * tokens)


def roofline_prefill(sequences: float, tokens: float) -> float:
    return 1e-4 + max(2e-3, 2e-5 * sequences * tokens) + 1e-9 * sequences * tokens**2


def roofline_timing(**options) -> ReplicaTiming:
    sizes = {"max_batch": 256, "kv_capacity": 400_000, "longest": 3000, **options}
    return ReplicaTiming.build(roofline_decode, roofline_prefill, **sizes)
