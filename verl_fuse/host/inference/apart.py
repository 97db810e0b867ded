"""Inference of a model that has workers of its own: finished samples go through its stage there, beside the stages of
all other models.

Invariants (tests/integration/test_inference_barrier.py):
- the lane is offered to policies while it is open, and not before;
- a sample is handed to this lane at most once, whatever other lanes have it;
- `finish` waits for what was handed over, and not for other work on the lane.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from verl_fuse.host.inference.samples import SampleInference
from verl_fuse.spec.step import LaneView


class InferenceApart:
    """`inference` of the model's stage on its workers' lane, while `is_open()`; the workers are on the devices of
    `replicas` (ranks)."""

    def __init__(self, inference: SampleInference, is_open: Callable[[], bool], replicas: Collection[int]) -> None:
        self.inference = inference
        self._is_open, self._replicas = is_open, frozenset(replicas)

    def views(self, freed: Collection[int]) -> tuple[LaneView, ...]:
        """Return the lane as policies see it; none while the lane is closed."""
        if not self._is_open():
            return ()
        released = self._replicas.issubset(freed)
        return tuple(replace(view, released=released) for view in self.inference.view(()))
