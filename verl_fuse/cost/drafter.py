"""Has the measured cost of a drafter (`fuse.speculation`) on an accelerator: with it, vLLM schedules no pass while
another computes, a pass without drafts has no full graph, and the drafter works between passes.

Invariants (tests/unit/cost/test_drafter.py):
- the factor at a number of requests that was measured is the measured ratio, and constant beyond the measured numbers;
- `FIGURES` has the extremes of the table.
"""

import numpy as np

from verl_fuse.spec.arrays import Floats

MEASURED_ON = "one H100, vLLM 0.24, 1.5 billion parameters"
# Requests at once: milliseconds of a pass that brings one token a request, without a drafter, and with one that finds
# nothing to draft.
PASSES = {1: (3.04, 4.96), 8: (2.89, 5.04), 64: (3.11, 6.44), 256: (5.71, 10.7)}
# Requests at once: milliseconds a token without a drafter, and with one all of whose drafts are accepted.
ACCEPTED = {8: (2.46, 0.73), 64: (2.8, 3.1)}


def pass_factor(requests: Floats) -> Floats:
    """Return how many times as long a pass of so many requests takes with a drafter on, before anything is drafted:
    interpolated in the logarithm of the requests."""
    factors = [drafter / stock for stock, drafter in PASSES.values()]
    return np.interp(np.log(requests), np.log(list(PASSES)), factors)


def _figures() -> str:
    factors = [drafter / stock for stock, drafter in PASSES.values()]
    speeds = " and ".join(
        f"{stock / drafter:.1f} times as fast with {requests} requests"
        for requests, (stock, drafter) in ACCEPTED.items()
    )
    return (
        f"on an accelerator a pass with the drafter on took {min(factors):.1f} to {max(factors):.1f} times as long "
        f"before anything was drafted ({min(PASSES)} to {max(PASSES)} requests; {MEASURED_ON}); tokens whose drafts "
        f"were all accepted came {speeds}"
    )


FIGURES = _figures()
