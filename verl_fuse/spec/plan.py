"""Describes an execution plan: for each model call of a step a mesh, a layout and a micro-batching, and settings of the
whole step.

Invariants (tests/unit/spec/test_plan.py):
- `Plan.from_json(plan.to_json()) == plan`;
- a call appears once, and its layout uses exactly the devices of its mesh;
- a file of another version, or with an unknown key or value, is refused, naming it and the allowed values.
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
from verl_fuse.spec.timeline import CALL_STAGES, UPDATE_WEIGHTS
from verl_fuse.spec.workload import Workload
from verl_fuse.spec.yaml_file import parse_yaml

PLAN_VERSION = 1
FEATURES = ("interstage", "pipeline", "realloc", "elastic", "placement")
Strategy = Literal["fsdp", "megatron"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Setting = bool | int | float | str
SCHEDULES = ("auto", "fused", "serial")
"""The values of `fuse.pipeline.schedule`."""


@dataclass(frozen=True)
class CallPlan:
    """The place of one call. `microbatches` are per data-parallel rank (and per mini-batch in training); `offload`:
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
    """`strategy` is verl's training engine (None: no engine runs this plan, which shows the gain that reallocation
    could reach), `overrides` the keys of verl's configuration that carry the plan out, by their dotted names.
    `migration_threshold` is the unfinished fraction of the batch below which samples are moved together (0: never);
    `replicas` the rollout replicas that generate (None: all); `schedule` is the value of `fuse.pipeline.schedule`
    (None: no pipeline is planned); `predicted` seconds by call, of weights moved to a call ("actor_generate_weights"),
    and in all ("step")."""

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
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise FuseError(f"plan: schedule={self.schedule!r}; allowed: {', '.join(SCHEDULES)}, or null")
        if "placement" in self.features and (self.replicas is None or "critic_train" not in names):
            raise FuseError("plan: feature 'placement'; needs a call critic_train, and replicas: those that generate")

    @property
    def switches(self) -> tuple[str, ...]:
        """Return the plugins that a run must have on (`fuse.<name>.enabled`); `elastic` parks the replicas that do not
        generate."""
        return tuple("elastic" if name == "placement" else name for name in self.features)

    @property
    def settings(self) -> dict[str, Setting | dict[str, int]]:
        """Return the keys under `fuse` that carry out the settings that are no key of verl's, by their names below
        `fuse`."""
        found: dict[str, Setting | dict[str, int]] = {}
        if "interstage" in self.features and self.migration_threshold:
            found["interstage.migration_threshold"] = self.migration_threshold
        if "pipeline" in self.features and self.schedule is not None:
            found["pipeline.schedule"] = self.schedule
        if "placement" in self.features and self.replicas is not None:
            mesh = self.call("critic_train").mesh
            found["placement.critic"] = {"first": mesh.first, "devices": mesh.size}
            found["placement.defer"] = True
            found["elastic.max_replicas"] = self.replicas
        return found

    @property
    def planned_seconds(self) -> dict[str, float]:
        """Return `predicted` by verl's names of the stages, and of the "step"."""
        stages = {**CALL_STAGES, "actor_generate_weights": UPDATE_WEIGHTS, "step": "step"}
        return {stage: self.predicted[name] for name, stage in stages.items() if name in self.predicted}

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
        """Return the plan of one call; a FuseError lists the existing calls."""
        for call in self.calls:
            if call.call == name:
                return call
        raise FuseError(f"plan: no call {name!r}; there is {', '.join(call.call for call in self.calls)}")

    @property
    def devices(self) -> int:
        """Return the number of devices from the first to the last used."""
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
        """Parse `to_json` output; a FuseError names the fault of any other text."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise FuseError(f"not a verl-fuse plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """Build from parsed JSON or YAML; a FuseError names the key and value at fault."""
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
    """The plain keys that a plan file has."""

    features: tuple[str, ...] = ()
    migration_threshold: float = 0.0
    replicas: int | None = None
    schedule: str | None = None
    strategy: str | None = None


@dataclass(frozen=True)
class _CallEntry:
    """The keys that a call has in a plan file."""

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
