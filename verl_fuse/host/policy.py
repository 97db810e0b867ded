"""Asks plugins for decisions. A policy that fails costs its optimisation, not the run: the step goes on as verl would, counted and said aloud."""

import logging
from collections.abc import Sequence
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.step import LaneView, RolloutView

logger = logging.getLogger(__name__)


class PolicyGuard:
    """Calls policy hooks; after a failure it answers None for the rest of the step."""

    def __init__(self, hook: Any):
        self._hook = hook
        self._off = False
        self.fallbacks = 0

    def begin_step(self) -> None:
        """Trust the policies again; `fallbacks` keeps counting over the run."""
        self._off = False

    def infer_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        """Keys of the micro-group to run now, or None."""
        if self._off:
            return None
        try:
            keys = self._hook.fuse_infer_next(view=view, lane=lane)
            return None if keys is None else _checked(keys, view, lane)
        except Exception:  # a plugin may raise anything
            self._off = True
            self.fallbacks += 1
            logger.exception("fuse_infer_next failed in step %d; this step streams no more samples", view.step)
            return None


def _checked(keys: Sequence[str], view: RolloutView, lane: LaneView) -> Sequence[str]:
    ready = {sample.key for sample in view.ready}
    strangers = [key for key in keys if key not in ready]
    if strangers or len(set(keys)) != len(keys):
        raise FuseError(
            f"fuse_infer_next returned {strangers[:3] or 'repeated keys'}; allowed: ready samples, each once"
        )
    if not keys or len(keys) % lane.multiple:
        raise FuseError(
            f"fuse_infer_next returned {len(keys)} samples for lane {lane.name!r}; allowed: positive multiples of {lane.multiple}"
        )
    return keys
