"""Finds the ranks to blame when a wait has lasted too long.

Invariants (tests/unit/runtime/test_blame.py):
- a silent process is to blame first: nobody hears from it, whatever its last message;
- else the ranks that the waiting rank waits for, directly or through others, and that do not wait themselves or are
  not in this program yet;
- else, when all of these wait, all of them: they wait for each other.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RankState:
    """The occupation of a rank since `since` (Unix seconds): it runs or waits for `what`, the latter from `peers`, in
    its program number `program`."""

    phase: Literal["runs", "waits"]
    what: str
    since: float
    program: int
    peers: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankState":
        data: dict[str, Any] = json.loads(text)
        return cls(data["phase"], data["what"], data["since"], data["program"], tuple(data["peers"]))

    def told(self, now: float) -> str:
        verb = "has been running" if self.phase == "runs" else "has been waiting for"
        return f"{verb} {self.what} for {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a program ended: the ranks at fault and a sentence that names them."""

    culprits: tuple[int, ...]
    text: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Verdict":
        data: dict[str, Any] = json.loads(text)
        return cls(tuple(data["culprits"]), data["text"])


def blame(states: Mapping[int, RankState], silent: Collection[int], waiting: int, now: float) -> Verdict:
    """Return the verdict of rank `waiting`, whose time is up."""
    me = states[waiting]
    late = {rank for rank, state in states.items() if state.program < me.program}
    reached = _reached(states, waiting, late)
    idle = [rank for rank in reached if rank in late or states[rank].phase == "runs"]
    if silent:
        culprits, ending = sorted(silent), ", and its process does not answer"
    elif idle:
        culprits, ending = idle, ""
    else:
        culprits, ending = reached, ""
    faults = "; ".join(
        f"rank {rank} {'has not started this program; it ' if rank in late else ''}{states[rank].told(now)}{ending}"
        for rank in culprits
    )
    peers = ", ".join(map(str, me.peers))
    wait = f"rank {waiting} waited {now - me.since:.1f} s for {me.what} from rank {peers}"
    return Verdict(tuple(culprits), f"{wait}: {faults}")


def _reached(states: Mapping[int, RankState], waiting: int, late: Collection[int]) -> list[int]:
    """Return the ranks that `waiting` waits for, directly or through others, in order; the search stops at `late`
    ranks."""
    found: set[int] = set()
    ahead = [waiting]
    while ahead:
        rank = ahead.pop()
        fresh = set() if rank in late else set(states[rank].peers) - found
        found |= fresh
        ahead += fresh
    return sorted(found)
