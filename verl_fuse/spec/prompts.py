"""Describes prompts that are about to be generated for policies: plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """Response tokens of one sample: `tokens` is the expected number, `upper` a bound that nine in ten samples stay
    below."""

    tokens: float
    upper: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to be generated `samples` times: `uid` in this step, `key` the same at every visit, `source`
    the name of its data set."""

    uid: str
    key: str
    source: str
    samples: int
    prediction: Prediction | None = None
