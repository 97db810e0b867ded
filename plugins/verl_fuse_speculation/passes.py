"""Record speculation pass by pass: each drafter appends to a file of its own, the driver reads the new passes.

Invariants (tests/unit/speculation/test_passes.py):
- every pass is read once; a file that no drafter wrote so is named once and left, after the passes before the damage;
- the costs of passes that follow a formula are found, even if some passes waited for something else;
- the tail has the passes of a replica after the last pass in which the replica ran more than `TAIL_SHARE` of the most
  samples that it ran at once.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

PASSES_SUFFIX = ".passes"
# The share of a step's samples at once that a replica still runs when its tail begins.
TAIL_SHARE = 0.25
# A pass that took so many times the median waited for something else.
WAITED = 4.0
# The cost of passes may be told from so many passes.
ENOUGH_PASSES = 16
PASS = np.dtype(
    [("time", "<f8"), ("step", "<i4"), ("rows", "<i4"), ("tokens", "<i4"), ("drafted", "<i4"), ("least", "<f8")]
)
# Of one file at a time: so many passes of one drafter take an hour or more.
MOST_BYTES = PASS.itemsize << 20

logger = logging.getLogger(__name__)


class ForwardPass(NamedTuple):
    """A forward pass that ended at `time` (Unix seconds), in which `rows` samples got `tokens` tokens and `drafted`
    tokens were tried; a token was drafted where its chance to be accepted was at least `least`."""

    time: float
    step: int
    rows: int
    tokens: int
    drafted: int
    least: float


@dataclass
class Passes:
    """The drafters' files in `folder`, as the driver reads them."""

    folder: Path
    _read: dict[str, int] = field(default_factory=dict)
    _damaged: set[str] = field(default_factory=set)

    def news(self) -> dict[str, np.ndarray]:
        """Return, by drafter, the passes that were appended since the last call."""
        found = {}
        for path in sorted(self.folder.glob(f"*{PASSES_SUFFIX}")):
            # Opening a pipe would wait for its writer.
            if path.name in self._damaged or not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                data = file.read(MOST_BYTES)
            passes = np.frombuffer(data, PASS, len(data) // PASS.itemsize)
            self._read[path.name] = self._read.get(path.name, 0) + passes.nbytes
            if not (sound := _sound(passes)).all():
                self._damaged.add(path.name)
                passes = passes[: sound.argmin()]
                logger.warning("%s is damaged, and left", path)
            if len(passes):
                found[path.stem] = passes
        return found


def _sound(passes: np.ndarray) -> np.ndarray:
    """Return a mask of the passes that a drafter may have written."""
    numbers = np.isfinite(passes["time"]) & (passes["least"] >= 0) & (passes["step"] >= 0) & (passes["drafted"] >= 0)
    return numbers & (passes["rows"] >= 1) & (passes["tokens"] >= passes["rows"])


def append(path: Path, passes: Sequence[ForwardPass]) -> None:
    """Append passes to the file of one drafter."""
    with path.open("ab") as file:
        whole = file.tell()
        try:
            file.write(np.array([tuple(one) for one in passes], PASS).tobytes())
            file.flush()
        except OSError:
            # Half a pass would shift all passes that follow.
            os.truncate(path, whole)
            raise


def in_tail(passes: np.ndarray) -> np.ndarray:
    """Return a mask of the passes of one replica in one step that belong to the replica's tail."""
    busy = np.flatnonzero(passes["rows"] > TAIL_SHARE * passes["rows"].max(initial=0))
    return np.arange(len(passes)) > (busy[-1] if len(busy) else -1)


def speculation_metrics(replicas: Iterable[np.ndarray]) -> dict[str, float]:
    """Return figures of a step's passes, by replica: the number of passes, the passes saved by drafts, the tokens of a
    sample per pass, and the fate of the drafts; of all passes, and of the passes of the tail."""
    found = [passes for passes in replicas if len(passes)]
    if not found:
        return {}
    tail = np.concatenate([passes[in_tail(passes)] for passes in found])
    costs = pass_costs(found)
    named = (
        {} if costs is None else {"fuse/speculation_pass_seconds": costs[0], "fuse/speculation_token_seconds": costs[1]}
    )
    return {**_of(np.concatenate(found), ""), **_of(tail, "tail_"), **named}


def pass_costs(replicas: Iterable[np.ndarray]) -> tuple[float, float] | None:
    """Return the seconds of a pass, and of each token that a pass computes, drafted tokens included; None where the
    passes cannot tell. Passes that took in new samples are left out."""
    seconds, tokens = [np.empty(0)], [np.empty(0)]
    for passes in replicas:
        decodes = passes["rows"][1:] <= passes["rows"][:-1]
        seconds.append(np.diff(passes["time"])[decodes])
        tokens.append((passes["rows"] + passes["drafted"]).astype(np.float64)[1:][decodes])
    took, computed = np.concatenate(seconds), np.concatenate(tokens)
    if len(took) < ENOUGH_PASSES:
        return None
    usual = took <= WAITED * np.median(took)
    took, computed = took[usual], computed[usual]
    if np.ptp(computed) == 0:
        return None
    each, fixed = np.polyfit(computed, took, 1)
    return (float(fixed), float(each)) if fixed > 0 and each >= 0 else None


def _of(passes: np.ndarray, part: str) -> dict[str, float]:
    if not len(passes):
        return {}
    tokens, rows, drafted = (float(passes[name].sum()) for name in ("tokens", "rows", "drafted"))
    return {
        f"fuse/speculation_{part}passes": float(len(passes)),
        f"fuse/speculation_{part}passes_saved": float((passes["tokens"] / passes["rows"] - 1).sum()),
        f"fuse/speculation_{part}tokens_per_pass": tokens / rows,
        f"fuse/speculation_{part}drafted_tokens": drafted,
        f"fuse/speculation_{part}acceptance": (tokens - rows) / drafted if drafted else 0.0,
        f"fuse/speculation_{part}least_chance": float(passes["least"].mean()),
    }
