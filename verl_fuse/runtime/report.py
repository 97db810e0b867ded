"""Defines a rank's report of a program that it ran."""

from dataclasses import dataclass

from verl_fuse.spec.timeline import Span


@dataclass(frozen=True)
class ProgramReport:
    """Measurements of one rank.

    `spans`: one per forward and backward, with the seconds its input was waited for. `peak_bytes`: the most that
    autograd held for backwards; `predicted_peak`: the most that the program holds by its problem, in the problem's
    memory unit (comparable if the unit is bytes). `held_bytes`: the bytes that autograd still holds after the last op;
    any number but 0 is a leak.
    """

    spans: tuple[Span, ...]
    peak_bytes: int
    predicted_peak: float
    held_bytes: int
