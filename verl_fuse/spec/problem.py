"""Describes a fused pipeline scheduling problem: several pipelines of micro-batches that share ranks.

Invariants (tests/unit/spec/test_problem.py):
- every number is finite; costs are positive, activations, limits and the transfer delay are not negative;
- a pipeline visits a rank at most once, and only ranks the problem has;
- `ScheduleProblem.from_json(problem.to_json()) == problem`, and equal problems have equal digests.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load

MAX_OPS = 200_000
"""Forward plus backward ops over all stages; more than this is a mistake in the input (32 ranks x 128
micro-batches x 2 models is 16384)."""

MAX_RANKS = 2**17
"""Several times the largest clusters there are."""

_PIPELINE_KEYS = ("model", "ranks", "microbatches", "forward", "backward", "activation")
_PROBLEM_KEYS = ("ranks", "memory_limit", "transfer", "pipelines", "time_unit", "memory_unit")
# Units of costs and activations; empty: any one unit.
_UNITS = {"time_unit": ("", "s"), "memory_unit": ("", "B")}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One copy of one model: stage s sits on `ranks[s]` and costs `forward[s]`, `backward[s]` (any one
    time unit) per micro-batch.

    `activation[s]` (any one memory unit) is held on that rank from the start of a micro-batch's forward to the end of
    its backward. A single number stands for the same value in every stage.
    """

    model: str
    ranks: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    activation: tuple[float, ...]

    def __init__(
        self,
        model: str,
        ranks: Sequence[int],
        microbatches: int,
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        activation: float | Sequence[float],
    ) -> None:
        where = f"pipeline {model!r}"
        if not isinstance(model, str) or not model:
            raise FuseError(f"pipeline model={model!r}: needs a name")
        if isinstance(ranks, str) or not isinstance(ranks, Sequence) or not ranks:
            raise FuseError(f"{where}: ranks={ranks!r}; needs a list of ranks in stage order")
        for rank in ranks:
            if not _is_int(rank) or rank < 0:
                raise FuseError(f"{where}: rank {rank!r}; needs a whole number >= 0")
        if len(set(ranks)) != len(ranks):
            twice = sorted({rank for rank in ranks if list(ranks).count(rank) > 1})
            raise FuseError(
                f"{where}: ranks={list(ranks)} puts two stages on rank {twice[0]}; one rank holds at most one stage of "
                "a pipeline"
            )
        if not _is_int(microbatches) or microbatches < 1:
            raise FuseError(f"{where}: microbatches={microbatches!r}; needs a whole number >= 1")
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "ranks", tuple(ranks))
        object.__setattr__(self, "microbatches", microbatches)
        object.__setattr__(self, "forward", _per_stage(forward, len(ranks), f"{where}: forward", positive=True))
        object.__setattr__(self, "backward", _per_stage(backward, len(ranks), f"{where}: backward", positive=True))
        object.__setattr__(
            self, "activation", _per_stage(activation, len(ranks), f"{where}: activation", positive=False)
        )

    @property
    def stages(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """Pipelines sharing `ranks` ranks, one op at a time on each.

    `transfer` delays a stage's result on its way to another rank; `memory_limit` bounds the activations held on every
    rank. `time_unit` is "s" and `memory_unit` "B" (bytes) where the numbers have these units, else empty.
    """

    ranks: int
    pipelines: tuple[Pipeline, ...]
    memory_limit: float | None = None
    transfer: float = 0.0
    time_unit: str = ""
    memory_unit: str = ""

    def __post_init__(self) -> None:
        if not _is_int(self.ranks) or self.ranks < 1:
            raise FuseError(f"ranks={self.ranks!r}; needs a whole number >= 1")
        if self.ranks > MAX_RANKS:
            raise FuseError(f"ranks={self.ranks}; needs at most {MAX_RANKS}")
        for name, known in _UNITS.items():
            if getattr(self, name) not in known:
                raise FuseError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(map(repr, known))}")
        object.__setattr__(self, "pipelines", tuple(self.pipelines))
        if not self.pipelines:
            raise FuseError("pipelines=[]; needs at least one pipeline")
        for index, pipeline in enumerate(self.pipelines):
            if max(pipeline.ranks) >= self.ranks:
                raise FuseError(
                    f"pipeline {index} ({pipeline.model!r}): unknown rank {max(pipeline.ranks)}; allowed: "
                    f"0..{self.ranks - 1}"
                )
        if self.ops > MAX_OPS:
            raise FuseError(
                f"{self.ops} ops (2 x stages x microbatches over all pipelines); at most {MAX_OPS} are allowed"
            )
        object.__setattr__(self, "transfer", _number(self.transfer, "transfer", positive=False))
        if self.memory_limit is not None:
            limit = _number(self.memory_limit, "memory_limit", positive=False)
            object.__setattr__(self, "memory_limit", limit)
            if limit < self.least_memory_limit:
                raise FuseError(
                    f"memory_limit={limit:g} is infeasible: one micro-batch alone needs {self.least_memory_limit:g} on "
                    "some rank; "
                    f"the least feasible limit is {self.least_memory_limit:g}"
                )

    @property
    def ops(self) -> int:
        """Return the number of forward and backward ops."""
        return sum(2 * p.stages * p.microbatches for p in self.pipelines)

    @property
    def least_memory_limit(self) -> float:
        """Return the smallest limit that any schedule can meet: running all micro-batches one by one reaches the
        largest single activation."""
        return max(max(p.activation) for p in self.pipelines)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                "ranks": self.ranks,
                "memory_limit": self.memory_limit,
                "transfer": self.transfer,
                "pipelines": [{key: getattr(p, key) for key in _PIPELINE_KEYS} for p in self.pipelines],
                # Units are written only where they are known: a problem without units keeps its digest.
                **{name: getattr(self, name) for name in _UNITS if getattr(self, name)},
            }
        )

    @classmethod
    def from_dict(cls, data: Any) -> "ScheduleProblem":
        """Build from parsed JSON; a FuseError names the key and value at fault."""
        _check_keys(data, _PROBLEM_KEYS, ("ranks", "pipelines"), "problem")
        if not isinstance(data["pipelines"], list):
            raise FuseError(f"problem: pipelines={data['pipelines']!r}; needs a list")
        pipelines = []
        for index, entry in enumerate(data["pipelines"]):
            _check_keys(entry, _PIPELINE_KEYS, _PIPELINE_KEYS, f"pipeline {index}")
            pipelines.append(Pipeline(**entry))
        units = {name: data[name] for name in _UNITS if name in data}
        return cls(data["ranks"], tuple(pipelines), data.get("memory_limit"), data.get("transfer", 0.0), **units)

    @classmethod
    def from_json(cls, text: str) -> "ScheduleProblem":
        """Parse the JSON form; a FuseError names the fault of any other text."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise FuseError(f"problem is not JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def read(cls, path: Path) -> "ScheduleProblem":
        """Read a problem file; every error names the file."""
        return load(path, cls.from_json)


def _check_keys(data: Any, allowed: Sequence[str], needed: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise FuseError(f"{where}: {data!r}; needs an object with keys {', '.join(needed)}")
    unknown = [key for key in data if key not in allowed]
    missing = [key for key in needed if key not in data]
    if unknown or missing:
        fault = f"unknown key {unknown[0]!r}" if unknown else f"missing key {missing[0]!r}"
        raise FuseError(f"{where}: {fault}; keys: {', '.join(allowed)}")


def _per_stage(value: Any, stages: int, where: str, positive: bool) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (_number(value, where, positive),) * stages
    if len(value) != stages:
        raise FuseError(
            f"{where}={list(value)}: {len(value)} values for {stages} stages; needs one number or one per stage"
        )
    return tuple(_number(item, where, positive) for item in value)


def _number(value: Any, where: str, positive: bool) -> float:
    wanted = "> 0" if positive else ">= 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FuseError(f"{where}={value!r}; needs a number {wanted}")
    try:
        number = float(value)
    except OverflowError as error:
        raise FuseError(f"{where} does not fit a float; needs a number {wanted}") from error
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise FuseError(f"{where}={value!r}; needs a finite number {wanted}")
    return number


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
