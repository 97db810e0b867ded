"""Has the measured cost of a drafter (`fuse.speculation`) on an accelerator: with it, vLLM schedules no pass while
another computes, a pass without drafts has no full graph, one of many tokens has none at all, and the drafter works
between passes.

Invariants (tests/unit/cost/test_drafter.py):
- at a number of requests that was measured, a pass of the measured model takes the measured seconds longer; between
  them the logarithm of the requests counts, beyond them nothing changes but the drafter's own work;
- `FIGURES` has the extremes of the table.
"""

import numpy as np

from verl_fuse.spec.arrays import Floats

MEASURED_ON = "one H100, vLLM 0.24, 1.5 billion parameters"
MEASURED_BLOCKS = 28
# Requests at once: milliseconds of a pass that brings one token a request, without a drafter, without a drafter and
# without asynchronous scheduling, and with a drafter that finds nothing to draft.
PASSES = {1: (3.04, 3.40, 4.96), 8: (2.89, 3.09, 5.04), 64: (3.11, 4.26, 6.44), 256: (5.71, 8.36, 10.7)}
# Requests at once: milliseconds a token without a drafter, and with one all of whose drafts are accepted.
ACCEPTED = {8: (2.46, 0.73), 64: (2.8, 3.1)}
# Seconds of the drafter's own work for a request: measured 0.4 ms with 64 requests, 1.8 with 256.
DRAFTING = 7e-6
# The most tokens of a pass that has a graph, and the seconds of a block without one: within 0.4 and 0.7 ms in the
# measured passes of 576 to 2304 tokens (plugins/verl_fuse_speculation/README.md), less their computation.
GRAPH_TOKENS, WITHOUT_GRAPH = 512, 5.5e-4


def added_seconds(requests: Floats, tokens: Floats, *, sequential: bool, blocks: int = MEASURED_BLOCKS) -> Floats:
    """Return the seconds that a pass of so many requests, `tokens` with drafts, takes longer with a drafter on.
    `sequential`: without it, too, no pass is scheduled while another computes. What graphs would have saved grows with
    the blocks of the model; where a block computes for longer than it is launched, less is lost."""
    running = np.log(np.maximum(requests, 1e-9))

    def measured(values: list[float]) -> Floats:
        return np.interp(running, np.log(list(PASSES)), 1e-3 * np.array(values))

    launched = measured([drafter - alone - 1e3 * DRAFTING * n for n, (_, alone, drafter) in PASSES.items()])
    seconds = DRAFTING * requests + launched * blocks / MEASURED_BLOCKS
    if not sequential:
        seconds = seconds + measured([alone - stock for stock, alone, _ in PASSES.values()])
    return seconds + np.where((tokens > GRAPH_TOKENS) & (tokens > requests), WITHOUT_GRAPH * blocks, 0.0)


def _figures() -> str:
    factors = [drafter / stock for stock, _, drafter in PASSES.values()]
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
