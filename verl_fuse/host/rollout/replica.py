"""Records one rollout replica of a run for the driver."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from verl_fuse.host.upstream.vllm import end
from verl_fuse.spec.step import Capacity


class State(Enum):
    """The state of a replica, as far as the driver has decided or found out."""

    GENERATING = auto()
    """It takes requests."""
    FREED = auto()
    """It was taken out of a running rollout, and sleeps until the weights have been synced."""
    PARKED = auto()
    """A standalone one that has joined, and waits for its first weights."""
    LOST = auto()
    """It is dead, or of no use any more: it takes no requests again."""


@dataclass(slots=True, eq=False)
class Replica:
    """verl's `handle` (RolloutReplica) with the run's record of the replica; a `standalone` replica has devices of its
    own."""

    handle: Any
    standalone: bool = False
    state: State = State.GENERATING
    capacity: Capacity = field(default=Capacity(1))

    def __str__(self) -> str:
        return f"replica {self.rank}"

    @property
    def rank(self) -> int:
        return self.handle.replica_rank

    @property
    def server(self) -> Any:
        """Return the replica's first server, which answers questions."""
        return self.handle.servers[0]

    @property
    def address(self) -> str:
        """Return the address of the replica's server, which is its name for the load balancer and for clients."""
        return self.handle.server_address

    def end(self) -> None:
        """End the replica's engine, or its servers."""
        for server in self.handle.servers:
            end(server)
