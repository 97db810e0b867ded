"""An execution plan: for each model call of a step a mesh, a layout and a micro-batching, and what
the step as a whole does.

Invariants (tests/unit/spec/test_plan.py):
- `Plan.from_json(plan.to_json()) == plan`;
- a call appears once, and its layout uses exactly the devices of its mesh;
- a file of another version, or with an unknown key or value, is refused, naming it and what is allowed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.files import load, save
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.workload import Workload
from verl_fuse.spec.yaml_file import parse_yaml

PLAN_VERSION = 1
FEATURES = ("interstage", "pipeline", "realloc", "elastic", "placement")
Strategy = Literal["fsdp", "megatron"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Setting = bool | int | float | str


@dataclass(frozen=True)
class CallPlan:
    """Where one call runs. `microbatches` are per data-parallel rank (and per mini-batch in training); `offload`:
    weights wait in host memory."""

    call: str
    mesh: Mesh
    layout: Layout
    microbatches: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        if self.layout.devices != self.mesh.size:
            raise FuseError(
                f"plan, call {self.call!r}: layout {self.layout} needs {self.layout.devices} devices, its mesh has "
                f"{self.mesh.size}"
            )
        if self.microbatches < 1:
            raise FuseError(f"plan, call {self.call!r}: microbatches={self.microbatches!r}; needs a whole number >= 1")


@dataclass(frozen=True)
class Plan:
    """`strategy` is verl's training engine (None: no engine runs this plan, it is what reallocation could reach),
    `overrides` the keys of verl's configuration that carry the plan out, by their dotted names.
    `migration_threshold` is the unfinished fraction of the batch below which samples are moved together (0: never);
    `replicas` the rollout replicas to run (None: all); `schedule` the method for the fused pipeline (None: serial);
    `predicted` seconds by stage and in all."""

    calls: tuple[CallPlan, ...]
    features: tuple[str, ...] = ()
    migration_threshold: float = 0.0
    replicas: int | None = None
    schedule: str | None = None
    strategy: str | None = None
    overrides: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    predicted: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        names = [call.call for call in self.calls]
        if not names or len(set(names)) != len(names):
            raise FuseError(f"plan: calls {', '.join(names) or 'none'}; needs each call once")
        for name in self.features:
            if name not in FEATURES:
                raise FuseError(f"plan: feature {name!r}; allowed: {', '.join(FEATURES)}")
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise FuseError(f"plan: strategy={self.strategy!r}; allowed: {', '.join(STRATEGIES)}, or null")
        if not 0 <= self.migration_threshold <= 1:
            raise FuseError(f"plan: migration_threshold={self.migration_threshold!r}; needs 0 to 1")
        if self.replicas is not None and self.replicas < 1:
            raise FuseError(f"plan: replicas={self.replicas!r}; needs a whole number >= 1, or null for all")

    def check(self, workload: Workload, cluster: Cluster) -> None:
        """Refuse, with a FuseError, a plan whose layouts do not divide the models, or that lies outside the cluster."""
        for call in workload.calls:
            planned = self.call(call.name)
            try:
                planned.layout.check(workload.model(call.role))
            except FuseError as error:
                raise FuseError(f"plan of {call.name}: {error}") from error
            if planned.mesh.end > cluster.devices:
                raise FuseError(
                    f"plan of {call.name}: devices {planned.mesh}; the cluster has {cluster.devices}, from 0 on"
                )

    def call(self, name: str) -> CallPlan:
        """The plan of one call; a FuseError lists the calls there are."""
        for call in self.calls:
            if call.call == name:
                return call
        raise FuseError(f"plan: no call {name!r}; there is {', '.join(call.call for call in self.calls)}")

    @property
    def devices(self) -> int:
        """Devices from the first to the last used."""
        return max(call.mesh.end for call in self.calls)

    def to_json(self) -> str:
        calls = [
            {
                "call": call.call,
                "mesh": [call.mesh.first, call.mesh.size],
                "layout": str(call.layout),
                "microbatches": call.microbatches,
                "offload": call.offload,
            }
            for call in self.calls
        ]
        return json.dumps(
            {
                "version": PLAN_VERSION,
                "features": list(self.features),
                "calls": calls,
                "migration_threshold": self.migration_threshold,
                "replicas": self.replicas,
                "schedule": self.schedule,
                "strategy": self.strategy,
                "overrides": dict(self.overrides),
                "predicted": dict(self.predicted),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse `to_json` output; a FuseError says what is wrong with anything else."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise FuseError(f"not a verl-fuse plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """From what was parsed; a FuseError names the key and value at fault."""
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, dict) else None
            raise FuseError(f"plan version {version!r}; this release reads {PLAN_VERSION}")
        calls, predicted = data.get("calls"), data.get("predicted", {})
        if not isinstance(calls, list) or not calls:
            raise FuseError(f"plan.calls={calls!r}; needs a list of calls")
        read = read_block(
            _File, {k: v for k, v in data.items() if k not in ("version", "calls", "predicted", "overrides")}, "plan"
        )
        return cls(
            calls=tuple(_call(entry, index) for index, entry in enumerate(calls)),
            features=read.features,
            migration_threshold=read.migration_threshold,
            replicas=read.replicas,
            schedule=read.schedule,
            strategy=read.strategy,
            overrides=_overrides(data.get("overrides", {})),
            predicted=_predicted(predicted),
        )

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read a plan file, JSON or, with comments, YAML; every error names the file."""
        return load(
            path,
            lambda text: cls.from_json(text) if text.lstrip().startswith("{") else cls.from_dict(parse_yaml(text)),
        )

    def write(self, path: Path) -> None:
        """Write the JSON form, to a temporary file first."""
        save(path, self.to_json() + "\n")


@dataclass(frozen=True)
class _File:
    """The plain keys of a plan file."""

    features: tuple[str, ...] = ()
    migration_threshold: float = 0.0
    replicas: int | None = None
    schedule: str | None = None
    strategy: str | None = None


@dataclass(frozen=True)
class _CallEntry:
    """The keys of a call in a plan file."""

    call: str
    mesh: tuple[int, int]
    layout: str
    microbatches: int = 1
    offload: bool = False


def _call(entry: Any, index: int) -> CallPlan:
    read = read_block(_CallEntry, entry, f"plan.calls[{index}]")
    return CallPlan(read.call, Mesh(*read.mesh), Layout.parse(read.layout), read.microbatches, read.offload)


def _overrides(value: Any) -> dict[str, Setting]:
    if not isinstance(value, Mapping):
        raise FuseError(f"plan.overrides={value!r}; needs a block of verl's keys")
    for key, setting in value.items():
        if not isinstance(setting, bool | int | float | str):
            raise FuseError(f"plan.overrides.{key}={setting!r}; needs a number, a text, true or false")
    return dict(value)


def _predicted(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise FuseError(f"plan.predicted={value!r}; needs a block of seconds")
    for key, seconds in value.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise FuseError(f"plan.predicted.{key}={seconds!r}; needs a finite number")
    return {key: float(seconds) for key, seconds in value.items()}
