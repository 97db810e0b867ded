"""Defines what a feature would have saved of a recorded run. Light: the records of features need it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_fuse.spec.timeline import INFERENCE_STAGES, REWARD

SCORE_STAGES = (REWARD, *INFERENCE_STAGES)


@dataclass(frozen=True)
class Saving:
    """The saving of a feature in seconds a step, and as a share of the paid device-seconds. `note`: how, or why
    nothing; `replayed`: it comes from a replayed generation, and is as wrong as that; `stages`: the share of a stage's
    seconds that it leaves nothing of for other features; not `known`: the run lacks what would tell it; `on`: the run
    had the feature."""

    note: str
    seconds: float = 0.0
    device_share: float = 0.0
    replayed: bool = False
    stages: Mapping[str, float] = field(default_factory=dict)
    known: bool = True
    on: bool = False
