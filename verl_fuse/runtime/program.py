"""Holds the instructions of every rank, in order: forwards and backwards, and the receives and sends between them.

Invariants (tests/unit/runtime/test_program.py):
- `PipelineProgram.from_text(program.problem, program.to_text()) == program`;
- the text form has one line per rank; `0F3` runs a forward, `0F3<1` receives its input from rank 1, `0F3>2`
  sends its result to rank 2;
- programs that differ in any instruction or in their problem have different digests.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from verl_fuse.errors import FuseError
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import OpKind

Action = Literal["run", "receive", "send"]

_TOKEN = re.compile(r"(\d+)([FB])(\d+)(?:([<>])(\d+))?")
_ARROWS: dict[str, Action] = {"<": "receive", ">": "send"}


class Instruction(NamedTuple):
    """Run the forward or backward of one micro-batch of one pipeline, receive its input from `peer`, or
    send its result to `peer`."""

    action: Action
    pipeline: int
    kind: OpKind
    microbatch: int
    peer: int | None = None

    @property
    def op(self) -> str:
        """Return the forward or backward of this instruction, in a schedule's text form."""
        return f"{self.pipeline}{self.kind}{self.microbatch}"

    @property
    def token(self) -> str:
        arrow = {"run": "", "receive": "<", "send": ">"}[self.action]
        return f"{self.op}{arrow}{'' if self.peer is None else self.peer}"


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """One row of instructions for each rank of `problem`; `check` tells whether they can run."""

    problem: ScheduleProblem
    rows: tuple[tuple[Instruction, ...], ...]

    def to_text(self) -> str:
        """Return one line per rank: `0F0 0F0>1 1F0<1 1F0`."""
        return "".join(" ".join(step.token for step in row) + "\n" for row in self.rows)

    @classmethod
    def from_text(cls, problem: ScheduleProblem, text: str) -> "PipelineProgram":
        """Parse the text form; a FuseError names a token that is no instruction."""
        rows = enumerate(text.splitlines())
        return cls(problem, tuple(tuple(_parse(token, rank) for token in line.split()) for rank, line in rows))

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the SHA-256 of each rank's row together with the problem."""
        problem = self.problem.to_json()
        return tuple(hashlib.sha256(f"{problem}\n{line}".encode()).hexdigest() for line in self.to_text().splitlines())

    def grid(self, marks: dict[int, int]) -> str:
        """Return the rows with instruction `marks[rank]` in brackets; an index past the end marks the end of the
        row."""
        lines = []
        for rank, row in enumerate(self.rows):
            tokens = [f"[{step.token}]" if marks.get(rank) == i else step.token for i, step in enumerate(row)]
            end = ["[end]"] if marks.get(rank) == len(row) else []
            lines.append(f"  rank {rank}: {' '.join(tokens + end)}")
        return "\n".join(lines)


def _parse(token: str, rank: int) -> Instruction:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise FuseError(f"program text, rank {rank}: {token!r}; needs 0F3 (run), 0F3<1 (receive) or 0F3>2 (send)")
    pipeline, kind, microbatch, arrow, peer = match.groups()
    action: Action = _ARROWS[arrow] if arrow else "run"
    return Instruction(
        action, int(pipeline), "F" if kind == "F" else "B", int(microbatch), int(peer) if arrow else None
    )
