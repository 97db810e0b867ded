"""Builds the views that policies are asked with, with as few words as a test needs. What cannot be in a run is refused.

Invariant (tests/unit/testing/test_views.py): a view has no sample twice, and no more finished samples than expected.
"""

from collections import Counter
from collections.abc import Sequence

from verl_fuse.errors import FuseError
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Capacity, LaneView, ReplicaView, RolloutView, Sample, Stage
from verl_fuse.spec.trajectory import TrajectoryKey

GRPO_STAGES: tuple[Stage, ...] = ("old_log_prob", "ref")


def samples(responses: Sequence[int], *, prompt: int = 4, each: int = 1) -> tuple[Sample, ...]:
    """Return finished samples, the oldest first, with responses and a prompt of so many tokens. `each` in a row belong
    to one prompt; keys are verl's: the first group is "g0", its samples "g0_0_0", "g0_1_0"."""
    return tuple(
        Sample(f"g{number // each}_{number % each}_0", f"g{number // each}", prompt, response)
        for number, response in enumerate(responses)
    )


def lane(
    queued: int = 0,
    multiple: int = 1,
    *,
    name: str = "train",
    stages: Sequence[Stage] = GRPO_STAGES,
    released: bool = False,
) -> LaneView:
    """Return a lane with so many micro-groups that are not finished, whose micro-groups have a multiple of `multiple`
    samples. `released`: nothing generates on its devices any more, as on a slice."""
    return LaneView(name, tuple(stages), queued, multiple, released)


def replicas(
    running: Sequence[int],
    *,
    slots: int = 8,
    routed: bool = True,
    unmovable: Sequence[int] = (),
    capacity: Capacity | None = None,
) -> tuple[ReplicaView, ...]:
    """Return replicas 0, 1, ... with so many requests each, of which `unmovable` cannot go on elsewhere (0 where none
    is given). Each has room for `slots` unfinished sequences; `capacity` of its engine: as many, of any length."""
    stuck = dict(enumerate(unmovable))
    return tuple(
        ReplicaView(
            rank, requests, slots, routed, unmovable=stuck.get(rank, 0), capacity=capacity or Capacity(slots)
        )
        for rank, requests in enumerate(running)
    )  # fmt: skip


def view(
    ready: Sequence[Sample] = (),
    *,
    expected: int | None = None,
    finished: int | None = None,
    step: int = 1,
    elapsed: float = 1.0,
    groups: int | None = None,
    groups_finished: int = 0,
    lanes: Sequence[LaneView] = (),
    replicas: Sequence[ReplicaView] = (),
    complete: Sequence[Sample] = (),
) -> RolloutView:
    """Return a rollout `elapsed` seconds after it began, with these finished samples in no lane yet and those of
    `complete` groups. By default `finished` counts just these, as many are `expected`, and as many `groups` of one
    sample each. A FuseError names what no run has: a sample twice, or more finished than expected."""
    if twice := [key for key, count in Counter(sample.key for sample in ready).items() if count > 1]:
        raise FuseError(f"sample {twice[0]!r} is ready twice; needs keys of its own for each sample")
    # A sample may have several trajectories, each with a key of its own.
    known = {TrajectoryKey.parse(sample.key).sample for sample in (*ready, *complete)}
    finished = len(known) if finished is None else finished
    expected = finished if expected is None else expected
    if not len(known) <= finished <= expected:
        raise FuseError(
            f"{len(known)} samples in the view, finished={finished}, expected={expected}; needs samples <= finished <= "
            "expected"
        )
    return RolloutView(
        step=step,
        elapsed=elapsed,
        expected=expected,
        finished=finished,
        groups=expected if groups is None else groups,
        groups_finished=groups_finished,
        ready=tuple(ready),
        lanes=tuple(lanes),
        replicas=tuple(replicas),
        complete=tuple(complete),
    )


def prompts(
    predicted: Sequence[float | None], *, samples: int = 1, source: str = "math", spread: float = 1.0
) -> list[Prompt]:
    """Return prompts "u0", "u1", ... of so many samples each, whose responses are predicted to have so many tokens
    (None: nothing is known), nine in ten at most `spread` times as many. Their keys, the same at every visit, are "k0",
    "k1", ..."""
    return [
        Prompt(
            f"u{n}", f"k{n}", source, samples, None if tokens is None else Prediction(tokens, tokens * spread)
        )
        for n, tokens in enumerate(predicted)
    ]  # fmt: skip
