"""`critic: auto` finds the critic's devices by simulating the run's own steps with the critic on 1, 2, 4, ... replicas'
devices, the last ones. Pure: knowledge in, seconds out.

Invariants (tests/unit/placement/test_placement_auto.py):
- the critic stays beside the actor where nothing was measured, and wherever less than LEAST_STEP_GAIN of a step is
  gained;
- a placement in which the critic's state does not fit its devices is no candidate;
- generation on fewer replicas takes its measured seconds times what simulation says; only generation hides the update
  and streamed values, because the actor's ranks compute on the critic's devices in all other stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Ints
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_placement.learned import CriticMemory, PlacementHistory, StepParts

LEAST_STEP_GAIN = 0.03
# Parameters, gradients and two moments of a trained parameter, in float32.
STATE_BYTES = 16


@dataclass(frozen=True)
class Pool:
    """The training devices of a run: `replicas` of `each` devices, of which at most `most` generate. vLLM takes the
    share `engine` of a device's memory."""

    replicas: int
    each: int
    most: int
    engine: float = 0.0

    def fits(self, memory: CriticMemory | None, apart: int) -> bool:
        """Tell whether the critic's state fits the devices of `apart` replicas beside their engines; activations are
        not counted."""
        if memory is None or memory.device is None or not apart:
            return True
        return memory.parameters * STATE_BYTES / (apart * self.each) <= memory.device * (1 - self.engine)


def predict(known: PlacementHistory, pool: Pool, candidates: Sequence[int]) -> dict[int, float]:
    """Return the mean seconds of the remembered steps with the critic on the devices of 0 (beside the actor) and of
    each of `candidates` replicas, as far as it fits; nothing where nothing was measured."""
    if known.decode is None or not known.steps or known.replicas != pool.replicas:
        return {}
    tried = [0, *(apart for apart in candidates if pool.fits(known.memory, apart))]
    seconds: dict[int, list[float]] = {apart: [] for apart in tried}
    for rows, parts in known.steps:
        simulated = _Generation(rows, known, known.decode)
        for apart, found in seconds.items():
            found.append(_seconds(parts, simulated, pool, apart))
    return {apart: float(np.mean(found)) for apart, found in seconds.items()}


def choose(predicted: Mapping[int, float]) -> int:
    """Return the number of replicas whose devices the critic has, 0 unless others gain enough."""
    best = min(predicted, key=predicted.__getitem__, default=0)
    return best if is_better(predicted, best, 0) else 0


def is_better(predicted: Mapping[int, float], one: int, other: int) -> bool:
    """Tell whether the placement `one` is predicted to be enough faster than `other`."""
    return one != other and predicted[one] <= predicted[other] * (1 - LEAST_STEP_GAIN)


def _seconds(parts: StepParts, simulated: "_Generation", pool: Pool, apart: int) -> float:
    generating = min(pool.replicas - apart, pool.most)
    generation = parts.generation * simulated.seconds(generating) / simulated.seconds(parts.replicas)
    if not apart:
        devices = pool.replicas * pool.each
        return parts.rest + generation + (parts.late + parts.update) / devices
    devices = apart * pool.each
    # Values that were streamed before are streamed there, behind the update.
    beside = (parts.update + parts.values - parts.late) / devices
    return parts.rest + max(generation, beside) + parts.late / devices


class _Generation:
    """Simulated generation of samples with the lengths `rows`, by number of replicas."""

    def __init__(self, rows: Ints, known: PlacementHistory, decode: DecodeCost) -> None:
        self._requests = Requests.of(rows[:, 0], np.maximum(rows[:, 1], 1))
        longest, room = int(self._requests.tokens.max()), known.capacity
        self._timing = ReplicaTiming.build(
            lambda sequences, context: decode.seconds(sequences),
            # A prefill is not measured apart: as one decode step.
            lambda sequences, tokens: decode.step + decode.sequence * sequences,
            max_batch=room.sequences,
            kv_capacity=max(longest, int(min(room.tokens, room.sequences * longest))),
            longest=longest,
        )
        self._found: dict[int, float] = {}

    def seconds(self, replicas: int) -> float:
        if replicas not in self._found:
            queues = round_robin(len(self._requests), replicas)
            self._found[replicas] = RolloutState.begin(self._requests, self._timing, queues).advance().seconds
        return self._found[replicas]
