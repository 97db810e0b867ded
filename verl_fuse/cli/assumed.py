"""Reads `--set KEY=VALUE`: what a simulation or a replay assumes."""

import dataclasses
from typing import Any, NamedTuple

import yaml

from verl_fuse.cli.asked_step import STEP
from verl_fuse.cost.calibration import EngineFloors
from verl_fuse.errors import FuseError
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.spec.block import read_block
from verl_fuse.spec.workload import Workload

FLOORS = "floors."
OPTIONS = (
    f"Repeatable: {STEP}KEY, a key of the step in place of the file's or the run's; "
    + ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(SimulationOptions))
    + f"; seconds that the software adds: {FLOORS}"
    + f", {FLOORS}".join(f"{field.name}" for field in dataclasses.fields(EngineFloors) if field.name != "name")
    + "."
)


class Given(NamedTuple):
    """The settings of `--set`: options, floors and keys of the workload, by their names."""

    options: dict[str, Any]
    floors: dict[str, Any]
    step: dict[str, Any]


def read_options(settings: list[str]) -> SimulationOptions:
    """Read the options of a replay, which has a step and floors of its own, from KEY=VALUE pairs."""
    given = read_settings(settings)
    for prefix, data in ((FLOORS, given.floors), (STEP, given.step)):
        if data:
            raise FuseError(f"--set {prefix}{next(iter(data))}: a recorded run has its own; allowed without --from")
    return read_block(SimulationOptions, given.options, "options")


def read_settings(settings: list[str]) -> Given:
    """Read KEY=VALUE pairs, values as YAML."""
    data: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise FuseError(f"--set {setting!r}: needs KEY=VALUE")
        try:
            data[key] = _number(value)
        except yaml.YAMLError as error:
            raise FuseError(f"--set {setting!r}: the value is not YAML") from error
    for key in data:
        if key in Workload.__dataclass_fields__ and key not in SimulationOptions.__dataclass_fields__:
            raise FuseError(f"--set {key}: a key of the step: --set {STEP}{key}=...")
    floors, step = (
        {key.removeprefix(prefix): data.pop(key) for key in list(data) if key.startswith(prefix)}
        for prefix in (FLOORS, STEP)
    )
    # Its parser names the forms.
    step |= {key: str(step[key]) for key in ("prompt", "response") if isinstance(step.get(key), int | float)}
    return Given(data, floors, step)


def _number(text: str) -> Any:
    """Return a value as YAML, and a number as people write it: to YAML 2e-5 is text."""
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
