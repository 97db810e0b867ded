"""Reads and writes the parameters of a task directory; this module needs no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.euclid import LARGEST_ALLOWED

DATA_SOURCE = "verl_fuse_cpu/euclid"
# Raise the number when the same parameters would make other files than before.
FORMAT = 1


@dataclass(frozen=True)
class WarmStart:
    """`steps` of AdamW over about `tokens` tokens each; a share `careless` of the demonstrations are guesses."""

    steps: int = 800
    tokens: int = 1024
    learning_rate: float = 3e-3
    # A pair whose trace has k lines is shown in proportion to k**-exponent: long traces mostly
    # repeat one easy subtraction.
    exponent: float = 1.5
    careless: float = 0.45
    # One thread gives the same weights on any machine of a kind, and no threads wait for each other where cores are
    # busy.
    threads: int = 1


@dataclass(frozen=True)
class Parameters:
    """The parameters of a task directory; equal parameters make equal directories on one kind of machine."""

    largest: int = 60
    train: int = 4096
    validation: int = 256
    tail_exponent: float = 1.5
    seed: int = 0
    # The model has so many layers; a pipeline has at most as many stages.
    layers: int = 3
    # A calculator subtracts, one turn for each subtraction.
    tools: bool = False
    warm_start: WarmStart = field(default_factory=WarmStart)

    def __post_init__(self) -> None:
        for allowed, otherwise in (
            (
                10 <= self.largest <= LARGEST_ALLOWED,
                f"largest number {self.largest}: allowed 10 to {LARGEST_ALLOWED}",
            ),
            (self.validation >= 1, f"{self.validation} validation problems: allowed 1 or more"),
            (self.train >= 1, f"{self.train} training problems: allowed 1 or more"),
            (
                0.0 <= self.tail_exponent <= 3.0,
                f"tail exponent {self.tail_exponent}: allowed 0 to 3 (3: nearly all problems short)",
            ),
            (1 <= self.layers <= 64, f"{self.layers} layers: allowed 1 to 64"),
            (self.seed >= 0, f"seed {self.seed}: allowed 0 or more"),
        ):
            if not allowed:
                raise FuseError(otherwise)

    def manifest(self) -> dict[str, Any]:
        return {"format": FORMAT, "task": DATA_SOURCE, **asdict(self)}
