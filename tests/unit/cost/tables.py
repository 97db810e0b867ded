"""A small profile for tests: times that can be told apart, not measured ones."""

from verl_fuse.cost.table import PARTS, MeasuredModel, Measurement, ProfileTable
from verl_fuse.spec.cluster import Device
from verl_fuse.spec.model import Model

TINY = Model("tiny", 3, 128, 4, 2, 32, 256, 111)
BATCHES, LENGTHS = (1, 4, 16), (16, 256)


def measured(scale: float = 1e-4) -> MeasuredModel:
    """Part k of PARTS takes scale * (k + 1) * (batch * length) ** 0.5."""
    return MeasuredModel(
        TINY,
        1,
        1e9,
        tuple(
            Measurement(
                part,
                direction,
                BATCHES,
                LENGTHS,
                tuple(tuple(scale * (k + 1) * (b * n) ** 0.5 for n in LENGTHS) for b in BATCHES),
            )
            for k, (part, direction) in enumerate(PARTS)
        ),
    )


def table() -> ProfileTable:
    return ProfileTable(Device("CPU", 1e10, 1e11, 1e10), "float32", 1, (measured(),))
