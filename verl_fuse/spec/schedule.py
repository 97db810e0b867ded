"""Describes a solved pipeline schedule: timed ops and the proven bounds of their quality.

Invariants (tests/unit/spec/test_schedule.py):
- ops are kept sorted by (rank, start, end);
- `Schedule.from_json(schedule.to_json()) == schedule`;
- the text form has one line per rank, one token `{pipeline}{F|B}{microbatch}` per op in running order, and parses
  back to the same orders.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load, save
from verl_fuse.spec.problem import ScheduleProblem

OpKind = Literal["F", "B"]

_TOKEN = re.compile(r"(\d+)([FB])(\d+)")
_FIELDS = (
    "makespan",
    "lower_bound",
    "optimal",
    "peak_memory",
    "memory_lower_bound",
    "memory_optimal",
    "solve_seconds",
    "method",
)


class Op(NamedTuple):
    """One forward ("F") or backward ("B") of one micro-batch of one pipeline on a rank, from `start` to `end`
    (the problem's time unit)."""

    rank: int
    pipeline: int
    kind: OpKind
    microbatch: int
    start: float
    end: float

    @property
    def token(self) -> str:
        return f"{self.pipeline}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Timed ops of a problem.

    `lower_bound` holds for every schedule of the problem; `memory_lower_bound` for every schedule with at most this
    makespan. `optimal` and `memory_optimal` tell that value and bound meet.
    """

    problem: ScheduleProblem
    ops: tuple[Op, ...]
    makespan: float
    lower_bound: float
    optimal: bool
    peak_memory: float
    memory_lower_bound: float
    memory_optimal: bool
    solve_seconds: float
    method: str

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "ops", tuple(sorted(self.ops, key=lambda op: (op.rank, op.start, op.end, op.pipeline, op.kind)))
        )

    @property
    def rows(self) -> tuple[tuple[Op, ...], ...]:
        """Return the ops of each rank in running order."""
        rows: list[list[Op]] = [[] for _ in range(self.problem.ranks)]
        for op in self.ops:
            rows[op.rank].append(op)
        return tuple(tuple(row) for row in rows)

    @property
    def bubble(self) -> float:
        """Return the idle fraction of rank-time before the makespan."""
        return 1.0 - sum(op.end - op.start for op in self.ops) / (self.makespan * self.problem.ranks)

    def to_text(self) -> str:
        """Return one line per rank: `0F0 1F0 0B0`."""
        return "".join(" ".join(op.token for op in row) + "\n" for row in self.rows)

    def to_json(self) -> str:
        data: dict[str, Any] = {field: getattr(self, field) for field in _FIELDS}
        data["problem"] = json.loads(self.problem.to_json())
        data["ops"] = [op._asdict() for op in self.ops]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Parse `to_json` output; a FuseError names the fault of any other text."""
        try:
            data: dict[str, Any] = json.loads(text)
            problem = ScheduleProblem.from_dict(data["problem"])
            ops = tuple(_op(entry) for entry in data["ops"])
            values = {field: data[field] for field in _FIELDS}
        except KeyError as error:
            raise FuseError(f"not a verl-fuse schedule: it has no key {error}") from error
        except (TypeError, ValueError) as error:
            raise FuseError(f"not a verl-fuse schedule: {error}") from error
        for field, value in values.items():
            wanted = bool if field.endswith("optimal") else str if field == "method" else float
            if wanted is float and isinstance(value, int) and not isinstance(value, bool):
                values[field] = value = float(value)
            if not isinstance(value, wanted) or (isinstance(value, float) and not math.isfinite(value)):
                raise FuseError(
                    f"not a verl-fuse schedule: {field}={value!r}; needs a "
                    f"{'finite number' if wanted is float else wanted.__name__}"
                )
        for op in ops:
            if op.rank not in range(problem.ranks) or op.pipeline not in range(len(problem.pipelines)):
                raise FuseError(f"not a verl-fuse schedule: op {op.token} on rank {op.rank} is not part of its problem")
        return cls(problem=problem, ops=ops, **values)

    @classmethod
    def read(cls, path: Path) -> "Schedule":
        """Read a schedule file; every error names the file."""
        return load(path, cls.from_json)

    def write(self, path: Path) -> None:
        """Write the JSON form, to a temporary file first."""
        save(path, self.to_json() + "\n")


def parse_text(text: str) -> tuple[tuple[tuple[int, OpKind, int], ...], ...]:
    """Return orders (pipeline, kind, microbatch) per rank from the text form."""
    rows = []
    for number, line in enumerate(text.splitlines()):
        row: list[tuple[int, OpKind, int]] = []
        for token in line.split():
            match = _TOKEN.fullmatch(token)
            if match is None:
                raise FuseError(
                    f"schedule text, rank {number}: {token!r}; needs {{pipeline}}{{F|B}}{{microbatch}} such as 0F3"
                )
            row.append((int(match[1]), "F" if match[2] == "F" else "B", int(match[3])))
        rows.append(tuple(row))
    return tuple(rows)


def _op(entry: dict[str, Any]) -> Op:
    op = Op(**entry)
    counts = (op.rank, op.pipeline, op.microbatch)
    times = (op.start, op.end)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts) or op.kind not in ("F", "B"):
        raise FuseError(f"not a verl-fuse schedule: op {entry!r}")
    if any(not isinstance(t, int | float) or isinstance(t, bool) or not math.isfinite(t) for t in times):
        raise FuseError(f"not a verl-fuse schedule: op {entry!r} needs finite start and end")
    return Op(op.rank, op.pipeline, op.kind, op.microbatch, float(op.start), float(op.end))
