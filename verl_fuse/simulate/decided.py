"""Plays a rollout in which a policy decides: what it is shown at each look, and what follows from its answers.

Invariants (tests/unit/simulate/test_decided.py):
- without an answer the rollout runs as it would have run, and nothing is inferred before its end;
- every request finishes once, on a replica that still takes requests, and a sample is inferred once, after it finished;
- a look comes when a sample has finished or a call has ended, and twice a second, no more often than the driver looks;
- views count what has happened by then: a policy sees no length of an unfinished sample.

A freed replica is a lane, whose calls run one after the other. What no lane was given is inferred at the end, on all
replicas, each from when its calls are done, as the driver does.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.policy import GuardedPolicy, Policy
from verl_fuse.simulate.rollout import RolloutState
from verl_fuse.simulate.tail import FusionResult, InferenceWork, MigrationCost, moved_to
from verl_fuse.spec.arrays import Ints
from verl_fuse.spec.events import Event, Generated, Migrated, Polled, StepBegun
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import Capacity, LaneView, ReplicaView, RolloutView, Sample, Stage

# Seconds between two looks at a rollout in which nothing changes.
AT_LEAST_EVERY = 0.5


@dataclass(frozen=True)
class SliceCall:
    """A micro-group on the devices of freed replica `replica`, from `start` to `end`, in seconds from the start of the
    rollout; `keys` of its samples."""

    replica: int
    start: float
    end: float
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Move:
    """The rollout as it was when replicas were freed, `time` seconds after its start; `survivors` went on."""

    time: float
    paused: RolloutState
    survivors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DecidedRollout:
    """The outcome. `seen` is the time at which the driver sees the last sample, `inferred` when inference has ended,
    both in seconds from the start of the rollout; `views` are what the policy was shown, one per look."""

    fused: FusionResult
    moves: tuple[Move, ...]
    calls: tuple[SliceCall, ...]
    views: tuple[RolloutView, ...]
    seen: float
    inferred: float


@dataclass(frozen=True)
class Setting:
    """The conditions of a rollout: the work of inference on a finished sample and the `stages` that it is, the cost of
    a move, and seconds between two looks of the driver (0: it sees at once). `slice_factor` returns, for micro-groups
    of so many samples, how much longer a freed replica takes (see `InferenceWork`)."""

    inference: InferenceWork
    moving: MigrationCost
    stages: tuple[Stage, ...]
    poll: float = 0.0
    step: int = 1
    slice_factor: Callable[[int], float] = lambda samples: 1.0


def decided(
    begun: RolloutState,
    group: Ints,
    policy: Policy,
    setting: Setting,
    homes: Mapping[str, int] | None = None,
    tell: Callable[[Event], None] = lambda event: None,
) -> DecidedRollout:
    """Play a rollout that has `begun`; `group` is the number of each request's prompt, `homes` are the replicas that
    prompts were assigned to, if any. `tell` is told the events of a run at its looks."""
    return _Play(begun, group, policy, setting, homes or {}, tell).run()


@dataclass(frozen=True)
class SimulatedRun:
    """What a policy is set up with: the replicas before the first step, devices of each, the stages of inference that
    freed replicas run, and the `tail` (samples that are left) at which the simulator would move them, 0: never."""

    replicas: tuple[ReplicaView, ...]
    devices_each: int
    stages: tuple[Stage, ...]
    tail: int


class SimulatedPolicy:
    """A policy that decides in simulated steps, one after the other. `make` sets it up for a run and returns its hooks.
    `faults` are its failures, at most one a step: the rest of such a step goes on without it, as in a run."""

    def __init__(self, make: Callable[[SimulatedRun], Any]):
        self._make, self._hook, self._guard = make, None, None
        self.faults: list[str] = []
        self.steps = 0

    def begin_step(self, run: Callable[[], SimulatedRun]) -> GuardedPolicy:
        """Return the policy for the next step; the first step sets it up."""
        if self._guard is None:
            self._hook = self._make(run())
            self._guard = _Told(self._hook, self.faults)
        self.steps += 1
        self._guard.begin_step(self.steps)
        self.tell(StepBegun(self.steps, 0.0))
        return self._guard

    def tell(self, event: Event) -> None:
        """Tell the policy of an event; a FuseError says that a run would end there."""
        assert self._hook is not None
        try:
            self._hook.fuse_event(event=event)
        except (Exception, SystemExit) as error:
            raise FuseError(
                f"fuse_event failed at {type(event).__name__} of step {event.step}: {type(error).__name__}: {error}; a "
                "run would end there"
            ) from error


class _Told(GuardedPolicy):
    def __init__(self, hook: Any, faults: list[str]):
        super().__init__(hook)
        self._faults = faults

    def failed(self, hook: str, error: BaseException) -> None:
        wrong = isinstance(error, FuseError) and str(error).startswith(hook)
        self._faults.append(str(error) if wrong else f"{hook} raised {type(error).__name__}: {error}")


def uid_of(group: int) -> str:
    """Return the uid of a prompt by its number."""
    return f"p{group}"


def replica_views(rollout: RolloutState) -> tuple[ReplicaView, ...]:
    """Return the replicas of a rollout before it begins."""
    capacity = Capacity(rollout.timing.max_batch, float(rollout.timing.kv_capacity))
    room = capacity.room(float(rollout.requests.tokens.mean()))
    return tuple(ReplicaView(rank, 0, room, True, capacity=capacity) for rank in range(rollout.replicas))


def prompts_of(group: Ints) -> list[Prompt]:
    """Return the prompts of a step, one for each number."""
    numbers, samples = np.unique(group, return_counts=True)
    pairs = zip(numbers.tolist(), samples.tolist(), strict=True)
    return [Prompt(uid_of(number), uid_of(number), "simulated", count) for number, count in pairs]


class _Play:
    """One rollout under way, at `now` seconds. `through` is how it ends if nothing more is decided."""

    def __init__(
        self,
        begun: RolloutState,
        group: Ints,
        policy: Policy,
        setting: Setting,
        homes: Mapping[str, int],
        tell: Callable[[Event], None],
    ) -> None:
        self._state, self._through = begun, begun.advance()
        self._policy, self._setting, self._tell = policy, setting, tell
        self._group, self._work = group, setting.inference.work(begun.requests)
        self._samples = _samples(begun, group)
        self._row = {sample.key: row for row, sample in enumerate(self._samples)}
        self._fresh = replica_views(begun)
        self._home = np.array([homes.get(uid_of(number), -1) for number in group.tolist()])
        # Of each sample: the replica that generates it, or the last one that did.
        self._at = begun.replica_of
        self._routed = np.ones(begun.replicas, bool)
        # Of each freed replica: when its devices can take the next call.
        self._free: dict[int, float] = {}
        self._ready: list[Sample] = []
        self._known = np.zeros(len(group), bool)
        self._taken = np.zeros(len(group), bool)
        self._moves: list[Move] = []
        self._calls: list[SliceCall] = []
        self._views: list[RolloutView] = []
        self._moved = 0
        self._released = math.inf
        self._now = 0.0

    def run(self) -> DecidedRollout:
        while self._step():
            view = self._view()
            self._event(Polled, view=view)
            self._views.append(view)
            if migration := self._policy.migration(view):
                freed = [rank for rank in np.flatnonzero(self._routed).tolist() if rank not in migration.survivors]
                self._free_replicas(freed)
                self._event(Migrated, view=view, survivors=migration.survivors, freed=tuple(freed))
                view = self._view()
            for number in range(len(view.lanes)):
                while keys := self._policy.infer_next(view, view.lanes[number]):
                    self._infer(sorted(self._free)[number], keys)
                    view = replace(view, ready=tuple(self._ready), lanes=self._lanes())
        return self._outcome()

    def _step(self) -> bool:
        """Go on to the next look; tell whether there is one before the last sample has finished."""
        finish = self._through.finish
        changes = [float(finish[finish > self._now].min()), *(c.end for c in self._calls if c.end > self._now)]
        self._now = seen_at(min([*changes, self._now + AT_LEAST_EVERY]), self._setting.poll)
        return self._now < finish.max()

    def _view(self) -> RolloutView:
        finish = self._through.finish
        done = finish <= self._now
        for row in sorted(np.flatnonzero(done & ~self._known).tolist(), key=lambda row: finish[row]):
            self._ready.append(self._samples[row])
        self._known |= done
        left = np.bincount(self._group[~done], minlength=int(self._group.max()) + 1)
        asked = np.bincount(self._group, minlength=len(left))
        return RolloutView(
            step=self._setting.step,
            elapsed=self._now,
            expected=len(done),
            finished=int(done.sum()),
            groups=int((asked > 0).sum()),
            groups_finished=int(((asked > 0) & (left == 0)).sum()),
            ready=tuple(self._ready),
            lanes=self._lanes(),
            replicas=self._replicas(done),
        )

    def _replicas(self, done: np.ndarray) -> tuple[ReplicaView, ...]:
        count = len(self._fresh)
        running = np.bincount(self._at[~done], minlength=count).tolist()
        assigned = np.bincount(self._home[self._home >= 0], minlength=count).tolist()
        unfinished = np.bincount(self._home[(self._home >= 0) & ~done], minlength=count).tolist()
        return tuple(
            replace(
                view, running=running[rank], routed=bool(self._routed[rank]),
                assigned=assigned[rank], unfinished=unfinished[rank],
            )
            for rank, view in enumerate(self._fresh)
        )  # fmt: skip

    def _lanes(self) -> tuple[LaneView, ...]:
        # Devices that are shared and saturated have no room for lanes.
        if not self._setting.stages or not self._setting.inference.dedicated:
            return ()
        queued = Counter(call.replica for call in self._calls if call.end > self._now)
        stages = self._setting.stages
        return tuple(LaneView(f"slice {rank}", stages, queued[rank], 1, released=True) for rank in sorted(self._free))

    def _free_replicas(self, freed: Sequence[int]) -> None:
        paused = self._state.advance(self._now)
        self._routed[list(freed)] = False
        self._moves.append(Move(self._now, paused, tuple(np.flatnonzero(self._routed).tolist())))
        self._state, moved = moved_to(paused, self._routed.copy(), self._now, self._setting.moving)
        self._moved += len(moved)
        self._at[moved] = self._state.replica_of[moved]
        self._through = self._state.advance()
        for rank in freed:
            self._free[rank] = max(self._now, float(paused.clocks[rank])) + self._setting.inference.load_seconds
        self._released = min(self._released, *(self._free[rank] for rank in freed))

    def _infer(self, rank: int, keys: Sequence[str]) -> None:
        rows = [self._row[key] for key in keys]
        start = max(self._free[rank], self._now)
        end = start + float(self._work[rows].sum()) * self._setting.slice_factor(len(rows))
        self._free[rank] = end
        self._calls.append(SliceCall(rank, start, end, tuple(keys)))
        self._taken[rows] = True
        mine = set(keys)
        self._ready = [sample for sample in self._ready if sample.key not in mine]

    def _outcome(self) -> DecidedRollout:
        through, inference = self._through, self._setting.inference
        end = through.seconds
        seen = seen_at(end, self._setting.poll)
        rest, free = float(self._work[~self._taken].sum()), np.full(through.replicas, seen)
        for call in self._calls:
            free[call.replica] = max(free[call.replica], call.end)
        last = inference.last_seconds if self._calls else 0.0
        inferred = max(shared_out(rest, free), float(free.max()), end + last)
        survivors = np.flatnonzero(self._routed)
        fused = FusionResult(through, min(self._released, end), end, inferred, survivors, self._moved)
        responses: dict[str, list[int]] = {}
        for sample in self._samples:
            responses.setdefault(sample.group, []).append(sample.response_len)
        self._event(Generated, responses=responses, discarded={}, prompts={})
        return DecidedRollout(fused, tuple(self._moves), tuple(self._calls), tuple(self._views), seen, inferred)

    def _event(self, kind: type[Event], **fields: Any) -> None:
        self._tell(kind(self._setting.step, self._now, **fields))


def shared_out(work: float, free: np.ndarray) -> float:
    """Return when so many seconds of work are done by replicas that are free from these times on, and end together."""
    times = np.sort(free)
    ends = (work + np.cumsum(times)) / np.arange(1, len(times) + 1)
    # With fewer replicas it would end after the next one is free.
    return float(ends.min())


def _samples(begun: RolloutState, group: Ints) -> list[Sample]:
    counts, found = Counter[int](), []
    lengths = zip(group.tolist(), begun.requests.prompt.tolist(), begun.requests.response.tolist(), strict=True)
    for number, prompt, response in lengths:
        found.append(Sample(f"{uid_of(number)}_{counts[number]}_0", uid_of(number), prompt, response))
        counts[number] += 1
    return found


def seen_at(moment: float, poll: float) -> float:
    """Return the first look at or after a moment, of a driver that looks every `poll` seconds."""
    return math.ceil(moment / poll - 1e-9) * poll if poll else moment
