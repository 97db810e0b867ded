"""Asks plugins for decisions. A policy that fails costs its optimisation, not the run: the step goes on as verl would, counted and said aloud."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from verl_fuse.errors import FuseError
from verl_fuse.spec.step import LaneView, Migration, RolloutView

T = TypeVar("T")

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

        def ask() -> Sequence[str] | None:
            keys = self._hook.fuse_infer_next(view=view, lane=lane)
            return None if keys is None else _checked_keys(keys, view, lane)

        return self._asked("fuse_infer_next", view, ask)

    def migration(self, view: RolloutView) -> Migration | None:
        """The replicas that finish the tail, or None."""

        def ask() -> Migration | None:
            migration = self._hook.fuse_migration(view=view)
            return None if migration is None else _checked_migration(migration, view)

        return self._asked("fuse_migration", view, ask)

    def _asked(self, hook: str, view: RolloutView, ask: Callable[[], T]) -> T | None:
        if self._off:
            return None
        try:
            return ask()
        except Exception:  # a plugin may raise anything
            self._off = True
            self.fallbacks += 1
            logger.exception("%s failed in step %d; the rest of this step runs as in stock verl", hook, view.step)
            return None


def _checked_migration(migration: Migration, view: RolloutView) -> Migration:
    routed = {replica.rank for replica in view.replicas if replica.routed}
    kept = set(migration.survivors)
    if not kept or not kept < routed:
        raise FuseError(
            f"fuse_migration returned survivors {sorted(kept)}; allowed: some, but not all, of the replicas that take requests: {sorted(routed)}"
        )
    return migration


def _checked_keys(keys: Sequence[str], view: RolloutView, lane: LaneView) -> Sequence[str]:
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
