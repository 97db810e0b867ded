"""Asks plugins for decisions about a rollout, and checks the answers. The trainer, the simulator and
`verl_fuse.testing` ask in the same way.

Invariant (tests/unit/host/test_policy.py): an answer that could not be carried out is a FuseError that names the hook,
what it returned and what is allowed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

from verl_fuse.errors import FuseError
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import LaneView, Migration, ReplicaView, RolloutView

T = TypeVar("T")


class Policy:
    """The policy hooks of a `hook` (pluggy's `manager.hook`); whatever a plugin raises is raised."""

    def __init__(self, hook: Any):
        self._hook = hook

    def predict(self, prompts: Sequence[Prompt]) -> Sequence[Prediction] | None:
        """Return predictions of response lengths, one per prompt, or None."""
        return self._asked(
            "fuse_predict", Sequence, lambda found: _checked_predictions(found, prompts), prompts=prompts
        )

    def scale(self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int | None:
        """Return the number of replicas that generate the step, or None; a number above the existing replicas counts as
        soon as so many exist."""
        seen = {"prompts": prompts, "replicas": replicas, "most": most}
        return self._asked("fuse_scale", Integral, lambda count: _checked_count(count, most), **seen)

    def assign(
        self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
    ) -> Mapping[str, int] | None:
        """Return the replica of each prompt, or None; `running` prompts keep their replicas, and their samples are the
        unfinished samples."""
        seen = {"prompts": prompts, "replicas": replicas, "running": running}
        return self._asked("fuse_assign", Mapping, lambda homes: _checked_homes(homes, prompts, replicas), **seen)

    def infer_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        """Return the keys of the micro-group to run now; none, or None: nothing now."""
        return self._asked(
            "fuse_infer_next", Sequence, lambda keys: _checked_keys(keys, view, lane), view=view, lane=lane
        )

    def train_next(self, view: RolloutView, lane: LaneView) -> Sequence[str] | None:
        """Return the keys of the complete groups to train on now; none, or None: nothing now."""
        return self._asked("fuse_train_next", Sequence, lambda keys: _checked_groups(keys, view), view=view, lane=lane)

    def migration(self, view: RolloutView) -> Migration | None:
        """Return the replicas that finish the long tail, including replicas with requests that cannot move; or None."""
        return self._asked(
            "fuse_migration", Migration, lambda migration: _checked_migration(migration, view), view=view
        )

    def _asked(self, hook: str, kind: type, checked: Callable[[Any], T], **seen: Any) -> T | None:
        answer = getattr(self._hook, hook)(**seen)
        if answer is None:
            return None
        if not isinstance(answer, kind):
            raise FuseError(f"{hook} returned {answer!r}; allowed: {kind.__name__}, or None")
        return checked(answer)


class GuardedPolicy(Policy):
    """Policy hooks whose failure costs a step's optimisation, not the run: after an exception or a wrong answer None is
    the answer for the rest of the step. `fallbacks` counts the failures."""

    def __init__(self, hook: Any):
        super().__init__(hook)
        self._off = False
        self.step = 0
        self.fallbacks = 0

    def begin_step(self, step: int) -> None:
        """Trust the policies again; `fallbacks` keeps counting over the run."""
        self._off = False
        self.step = step

    def failed(self, hook: str, error: BaseException) -> None:
        """Tell of a failure in the step; called while the exception is handled."""

    def _asked(self, hook: str, kind: type, checked: Callable[[Any], T], **seen: Any) -> T | None:
        if self._off:
            return None
        try:
            return super()._asked(hook, kind, checked, **seen)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise any exception
            self._off = True
            self.fallbacks += 1
            self.failed(hook, error)
            return None


def _checked_predictions(found: Sequence[Prediction], prompts: Sequence[Prompt]) -> Sequence[Prediction]:
    if len(found) != len(prompts):
        raise FuseError(f"fuse_predict returned {len(found)} predictions for {len(prompts)} prompts; allowed: one each")
    strange = next((p for p in found if not (math.isfinite(p.upper) and 0 <= p.tokens <= p.upper)), None)
    if strange is not None:
        raise FuseError(f"fuse_predict returned {strange}; allowed: finite, 0 <= tokens <= upper")
    return found


def _checked_count(count: int, most: int) -> int:
    if not 1 <= count <= most:
        raise FuseError(f"fuse_scale returned {count!r}; allowed: 1 to {most} replicas")
    return count


def _checked_homes(
    homes: Mapping[str, int], prompts: Sequence[Prompt], replicas: Sequence[ReplicaView]
) -> Mapping[str, int]:
    ranks = {replica.rank for replica in replicas}
    strangers = [
        f"{uid!r}: {rank!r}" for uid, rank in homes.items() if not isinstance(rank, Integral) or rank not in ranks
    ]
    unknown = sorted(set(homes) - {prompt.uid for prompt in prompts})
    if strangers or unknown:
        raise FuseError(
            f"fuse_assign returned {(strangers or unknown)[0]}; allowed: prompts of this step, on replicas "
            f"{sorted(ranks)}"
        )
    return homes


def _checked_migration(migration: Migration, view: RolloutView) -> Migration | None:
    routed = {replica.rank for replica in view.replicas if replica.routed}
    kept = set(migration.survivors)
    if not kept or not kept < routed:
        raise FuseError(
            f"fuse_migration returned survivors {sorted(kept)}; allowed: some, but not all, of the replicas that take "
            f"requests: {sorted(routed)}"
        )
    # A policy may ignore that some requests cannot move.
    kept |= {replica.rank for replica in view.replicas if replica.routed and replica.unmovable}
    return replace(migration, survivors=tuple(sorted(kept))) if kept < routed else None


def _checked_keys(keys: Sequence[str], view: RolloutView, lane: LaneView) -> Sequence[str]:
    ready = {sample.key for sample in view.ready}
    strangers = [key for key in keys if key not in ready]
    if strangers or len(set(keys)) != len(keys):
        raise FuseError(
            f"fuse_infer_next returned {strangers[:3] or 'repeated keys'}; allowed: ready samples, each once"
        )
    if len(keys) % lane.multiple:
        raise FuseError(
            f"fuse_infer_next returned {len(keys)} samples for lane {lane.name!r}; allowed: multiples of "
            f"{lane.multiple}"
        )
    return keys


def _checked_groups(keys: Sequence[str], view: RolloutView) -> Sequence[str]:
    groups = {sample.key: sample.group for sample in view.complete}
    strangers = [key for key in keys if key not in groups]
    if strangers or len(set(keys)) != len(keys):
        raise FuseError(
            f"fuse_train_next returned {strangers[:3] or 'repeated keys'}; allowed: samples of complete "
            "groups, each once"
        )
    wanted = {groups[key] for key in keys}
    if missing := [key for key, group in groups.items() if group in wanted and key not in set(keys)]:
        raise FuseError(f"fuse_train_next left out {missing[0]} of a group it returned; allowed: whole groups")
    return keys
