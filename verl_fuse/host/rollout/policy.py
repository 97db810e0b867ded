"""Asks plugins for decisions in a run: a failing policy is counted and logged, and the step goes on like verl's own."""

import logging

from verl_fuse.policy import GuardedPolicy

logger = logging.getLogger(__name__)


class PolicyGuard(GuardedPolicy):
    """A guard that logs each failure."""

    def failed(self, hook: str, error: Exception) -> None:
        logger.exception("%s failed in step %d; the rest of this step runs as in stock verl", hook, self.step)
