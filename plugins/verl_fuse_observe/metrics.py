"""Compute the metrics of a step, each described in README.md.

Invariants (tests/contracts/test_observe.py):
- a number the timeline cannot give is left out, never logged as 0;
- every metric is in the README's table.
"""

from verl_fuse.timeline.summary import StepSummary


def step_metrics(summary: StepSummary) -> dict[str, float]:
    """Return each metric's value by name."""
    metrics = {
        "fuse/step_seconds": summary.seconds,
        "fuse/requests": float(summary.requests),
        **{f"fuse/idle_fraction/{kind}": fraction for kind, fraction in summary.idle.items()},
        "fuse/generation_seconds": summary.generation_seconds,
        "fuse/long_tail_fraction": summary.long_tail_fraction,
    }
    return {name: value for name, value in metrics.items() if value is not None}
