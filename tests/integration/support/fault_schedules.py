"""Seeded fault schedules for one step: what it generates, when the tail migrates, and what breaks when. Pure.

A schedule's kind follows from its seed, everything else is drawn.
"""

import random
from dataclasses import dataclass

REPLICAS, PROMPTS, SAMPLES_PER_PROMPT = 3, 8, 3
LONG = 90
# Seconds of a decode step, and of each sequence in it: as recorded on real vLLM (a step of
# `ci.bench.interstage`, one core per replica).
STEP_SECONDS, SEQUENCE_SECONDS = 0.0042, 0.0013
KINDS = (
    "kill",
    "hang",
    "slow",
    "abort storm",
    "empty batch",
    "all long",
    "all short",
    "exit",
    "mute",
    "garbage",
    "two kills",
    "all kills",
)
# What is done to a server (counting_server.py).
ACTIONS = {
    "kill": "kill_engine",
    "two kills": "kill_engine",
    "all kills": "kill_engine",
    "exit": "exit",
    "hang": "pause_at",
    "mute": "hang",
    "slow": "slow_down",
    "garbage": "answer_garbage",
    "abort storm": "abort_and_go_on",
}
# After these a replica is no more, if it had anything to do.
FATAL = ("kill", "two kills", "all kills", "exit", "hang", "garbage")


@dataclass(frozen=True)
class Fault:
    """`action` of the server of `replica`, `at` seconds into the step."""

    at: float
    replica: int
    action: str


@dataclass(frozen=True)
class Schedule:
    """`lengths` per prompt and sample, 0 for a rollout that fails; `threshold` as in the configuration."""

    seed: int
    kind: str
    lengths: tuple[tuple[int, ...], ...]
    threshold: int | float
    faults: tuple[Fault, ...]

    @property
    def asked(self) -> dict[tuple[int, int], int]:
        """Return the length by (prompt, sample), without samples that fail."""
        return {(p, s): n for p, group in enumerate(self.lengths) for s, n in enumerate(group) if n}


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    threshold = rng.choice([0.1, 0.25, 0.5, 0.9, 1, 6])
    return Schedule(seed, kind, _lengths(rng, kind), threshold, _faults(rng, kind))


def _lengths(rng: random.Random, kind: str) -> tuple[tuple[int, ...], ...]:
    def length() -> int:
        if kind == "all long":
            return LONG
        if kind == "all short":
            return rng.randint(1, 2)
        return rng.randint(50, LONG) if rng.random() < 0.2 else rng.randint(1, 25)

    lengths = [[length() for _ in range(SAMPLES_PER_PROMPT)] for _ in range(PROMPTS)]
    if kind == "empty batch":
        # Every rollout fails, or some do.
        share = rng.choice([1.0, 1.0, 0.3])
        lengths = [[0 if rng.random() < share else n for n in group] for group in lengths]
    return tuple(map(tuple, lengths))


def _faults(rng: random.Random, kind: str) -> tuple[Fault, ...]:
    if kind not in ACTIONS:
        return ()
    count = {"abort storm": 15, "two kills": 2, "all kills": REPLICAS}.get(kind, 1)
    replicas = rng.sample(range(REPLICAS), count) if kind.endswith(" kills") else rng.choices(range(REPLICAS), k=count)
    at = sorted(rng.uniform(0.0, 0.7) for _ in range(count))
    return tuple(Fault(*pair, ACTIONS[kind]) for pair in zip(at, replicas, strict=True))
