"""Defines the messages of driver and ranks about an update of actor and critic."""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_fuse.spec.timeline import Span

MODELS = ("actor", "critic")
Counts = tuple[int, int]
"""Micro-batches per call, of actor and critic; 0 for a model that has none left."""


@dataclass(frozen=True)
class UpdateOrder:
    """The way in which ranks run an update: without `together` one model after the other, each in Megatron's own order.

    `schedules`: JSON forms by counts; calls with other counts run one after the other. `timeout`: seconds a rank may
    wait at most.
    """

    together: bool
    schedules: Mapping[Counts, str]
    timeout: float


@dataclass(frozen=True)
class ModelCost:
    """The median seconds that one micro-batch's forward and backward take in a rank's stage of a model.

    `activation`: bytes that autograd holds for one micro-batch; None where it was not measured.
    """

    forward: float
    backward: float
    activation: float | None


@dataclass(frozen=True)
class RankReport:
    """The report of one process, which plays `rank` of the problem.

    `placements`: ranks of the problem, in stage order, of every pipeline of each model. `counts`: of every pair of
    calls, in order; `fused`: how many of these ran as one program. `headroom`: bytes there are for activations, None if
    unknown. `spans`: ops, and those predicted.
    """

    rank: int
    placements: Mapping[str, tuple[tuple[int, ...], ...]]
    costs: Mapping[str, ModelCost]
    counts: tuple[Counts, ...]
    fused: int
    headroom: int | None
    spans: tuple[Span, ...]
