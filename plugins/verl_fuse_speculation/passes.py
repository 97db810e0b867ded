"""What speculation did, pass by pass: each drafter appends to a file of its own, the driver reads what is new.

Invariants (tests/unit/speculation/test_passes.py):
- every pass is read once;
- of the tail are the passes of a replica after the last one in which it ran more than `TAIL` of the most samples it ran at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIX = ".passes"
# The share of a step's samples at once that a replica still runs when its tail begins.
TAIL = 0.25
PASS = np.dtype(
    [(name, "<f8" if name in ("time", "least") else "<i4") for name in ("time", "step", "rows", "tokens", "drafted", "least")]
)


class Pass(NamedTuple):
    """A forward pass that ended at `time` (Unix seconds), in which `rows` samples got `tokens` tokens, `drafted` tokens being tried; a token
    was drafted where it was likely to be accepted at least as often as `least`."""

    time: float
    step: int
    rows: int
    tokens: int
    drafted: int
    least: float


@dataclass
class Passes:
    """The files in `folder`, as the driver reads them."""

    folder: Path
    _read: dict[str, int] = field(default_factory=dict)

    def news(self) -> dict[str, np.ndarray]:
        """By drafter, the passes that were appended since this was asked last."""
        found = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                data = file.read()
            whole = len(data) // PASS.itemsize * PASS.itemsize
            self._read[path.name] = self._read.get(path.name, 0) + whole
            if whole:
                found[path.stem] = np.frombuffer(data[:whole], PASS)
        return found

    def skip(self) -> None:
        """What is there counts as read."""
        self.news()


def append(path: Path, passes: Sequence[Pass]) -> None:
    """Append to the file of one drafter."""
    with path.open("ab") as file:
        file.write(np.array([tuple(one) for one in passes], PASS).tobytes())


def in_tail(passes: np.ndarray) -> np.ndarray:
    """Which passes of one replica in one step are those of its tail."""
    busy = np.flatnonzero(passes["rows"] > TAIL * passes["rows"].max(initial=0))
    return np.arange(len(passes)) > (busy[-1] if len(busy) else -1)


def metrics(replicas: Iterable[np.ndarray]) -> dict[str, float]:
    """Of the passes of a step, by replica: how many, how many there would have been, and what became of the drafts."""
    found = [passes for passes in replicas if len(passes)]
    whole = np.concatenate(found) if found else np.empty(0, PASS)
    tail = np.concatenate([passes[in_tail(passes)] for passes in found]) if found else whole
    if not len(whole):
        return {}
    return {**_of(whole, ""), **_of(tail, "tail_")}


def _of(passes: np.ndarray, part: str) -> dict[str, float]:
    if not len(passes):
        return {}
    tokens, rows, drafted = (float(passes[name].sum()) for name in ("tokens", "rows", "drafted"))
    return {
        f"fuse/speculation_{part}passes": float(len(passes)),
        f"fuse/speculation_{part}tokens_per_pass": tokens / rows,
        f"fuse/speculation_{part}drafted_tokens": drafted,
        f"fuse/speculation_{part}acceptance": (tokens - rows) / drafted if drafted else 0.0,
    }
