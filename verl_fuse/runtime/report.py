"""A rank's report of a program it ran."""

from dataclasses import dataclass

from verl_fuse.spec.timeline import Span


@dataclass(frozen=True)
class ProgramReport:
    """Measurements of one rank.

    `spans`: one per forward and backward, with the seconds its input was waited for. `peak_bytes`: the most that
    autograd held for backwards; `predicted_peak`: what the program holds at most by its problem, in the problem's
    memory unit (a comparison makes sense if that is bytes). `held_bytes`: what autograd still holds after the last op;
    anything but 0 is a leak.
    """

    spans: tuple[Span, ...]
    peak_bytes: int
    predicted_peak: float
    held_bytes: int
