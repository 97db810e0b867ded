"""Describes a running step for policies: plain values, no handles."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from verl_fuse.spec.block import quoted

Stage = Literal["old_log_prob", "ref", "values"]
STAGES: tuple[Stage, ...] = get_args(Stage)

# Seconds between two looks of verl's own trainer at a running rollout (verl/trainer/ppo/v1/replay_buffer.py).
VERL_POLL_INTERVAL = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished trajectory: its TransferQueue key, its prompt group, and its lengths in tokens."""

    key: str
    group: str
    prompt_len: int
    response_len: int

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.response_len


@dataclass(frozen=True, slots=True)
class LaneView:
    """One set of workers that runs one collective call at a time.

    `queued` counts micro-groups handed over and not finished; a micro-group's size must be a multiple of `multiple`.
    `released`: no replica generates on its devices any more.
    """

    name: str
    stages: tuple[Stage, ...]
    queued: int
    multiple: int
    released: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room of a replica's engine: so many `sequences` at most, and so many `tokens` in its KV cache
    (infinite where the engine does not report it)."""

    sequences: int
    tokens: float = math.inf

    def room(self, each: float) -> int:
        """Return the number of sequences of `each` tokens that the engine holds; at least one. An engine that gets more
        sequences, or longer ones, lets some wait."""
        return max(1, int(min(self.sequences, self.tokens // max(1.0, each))))


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One rollout replica: `running` requests in flight there, by the load balancer's count, or by the server's own
    number where that has been less for a while; `routed` while it takes requests.

    `slots`: the number of unfinished sequences that have room there, by their predicted lengths and `capacity`.
    `unmovable` of the running requests cannot go on elsewhere: a replica that is freed while it has such requests loses
    their tokens. `standalone`: the replica has devices of its own, which are given back once it is not wanted any more.
    `assigned` samples of the step were meant for it (`fuse_assign`), of which `unfinished` are not done, wherever they
    are now; samples of discarded groups are in neither.
    """

    rank: int
    running: int
    slots: int
    routed: bool
    assigned: int = 0
    unfinished: int = 0
    standalone: bool = False
    unmovable: int = 0
    capacity: Capacity = Capacity(1)


@dataclass(frozen=True, slots=True)
class Migration:
    """Only replicas `survivors` go on generating: requests of all other replicas move to them, tokens kept, and the
    other replicas are free until the step ends.

    `cause`: the configuration key that asked for it, for messages.
    """

    survivors: tuple[int, ...]
    cause: str = field(default="fuse_migration", compare=False)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request about to be sent to a replica: prompt and tokens so far are `tokens` in all, of which `generated`
    came from other replicas.

    `weights` names the weights that generate it: no two runs, and no two steps or validations of a run, have a
    name in common. `source` is the rank of the replica that had the request before; None for a new request, or after a
    standalone replica.
    """

    id: str
    weights: str
    tokens: int
    generated: int = 0
    source: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The rollout of `step` at one poll: `expected` samples in all, `finished` so far, `ready` finished and in no lane
    yet. Where a policy is asked for the lane of a model with workers of its own, `ready` are the samples that this lane
    has not had, and `lanes` is this lane alone. `complete`: samples of groups that are finished and have gone through
    all streamed stages, where updates may be streamed; group after group, without groups that a lane trains on.
    `missing` samples will not come: of groups whose rollout has ended without them (an agent raised). Samples of
    discarded groups (dynamic sampling) are in none of these; samples asked for in their place are expected."""

    step: int
    elapsed: float
    expected: int
    finished: int
    groups: int
    groups_finished: int
    ready: tuple[Sample, ...]
    lanes: tuple[LaneView, ...]
    replicas: tuple[ReplicaView, ...] = ()
    complete: tuple[Sample, ...] = ()
    missing: int = 0

    @property
    def unfinished(self) -> int:
        return self.expected - self.finished - self.missing


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a configuration cannot run: the key, its value, and the allowed values. `unlock`: keys with values
    that lift it; empty where no value does, or a person has to choose one."""

    key: str
    value: Any
    allowed: str
    unlock: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.key}={quoted(self.value)}: {self.allowed}"
