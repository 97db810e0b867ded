"""Asks plugins for decisions in a run: a failing policy is counted and logged, and the step goes on like verl's own."""

import logging
from typing import Any

from verl_fuse.policy import GuardedPolicy
from verl_fuse.spec.timeline import Timeline

logger = logging.getLogger(__name__)


class PolicyGuard(GuardedPolicy):
    """A guard that logs each failure."""

    def failed(self, hook: str, error: Exception) -> None:
        logger.exception("%s failed in step %d; the rest of this step runs as in stock verl", hook, self.step)


def plugin_metrics(hook: Any, timeline: Timeline) -> tuple[dict[str, float], int]:
    """Return the metrics that plugins make of a step's timeline, and how many failed: of these none are logged."""
    metrics, failed = dict[str, float](), 0
    for impl in hook.fuse_metrics.get_hookimpls():
        try:
            metrics.update(impl.function(*([timeline] * len(impl.argnames))) or {})
        except Exception:
            logger.exception("fuse_metrics of plugin %s failed in step %d", impl.plugin_name, timeline.step)
            failed += 1
    return metrics, failed
