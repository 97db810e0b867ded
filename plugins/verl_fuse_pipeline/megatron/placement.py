"""Places a pipeline's stages: Megatron's own layout of ranks, or pipelines side by side with their stages in reverse
order.

Invariants (tests/integration/test_megatron_views.py):
- reversed, copy k of a model that takes `block` ranks sits on ranks [k * block, (k + 1) * block), its last stage first;
- tensor and context parallel groups are neighbouring ranks, in Megatron's order;
- the ranks of a group come in the order of stages, replicas or shards, which sorting them would undo.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.parallel_state as parallel_state
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Megatron's name for the layout in which the ranks of one pipeline are neighbours; its default spreads a stage over
# neighbours.
CONTIGUOUS = "tp-cp-ep-pp-dp"


class MirroredRanks(parallel_state.RankGenerator):
    """Megatron's rank generator for pipelines side by side, each in reverse."""

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        super().__init__(tp, ep, dp, pp, cp, CONTIGUOUS, rank_offset)

    def get_ranks(self, token: str) -> list[list[int]]:
        return [[self._place(rank) for rank in ranks] for ranks in super().get_ranks(token)]

    def _place(self, rank: int) -> int:
        """Return the same place within the mirrored stage."""
        width = self.tp * self.cp * self.ep
        copy, within = divmod(rank - self.rank_offset, width * self.pp)
        stage, place = divmod(within, width)
        return self.rank_offset + (copy * self.pp + self.pp - 1 - stage) * width + place


@contextmanager
def mirrored_pipelines() -> Iterator[None]:
    """Mirror the ranks of parallel states that Megatron initialises within the block."""
    create_group = parallel_state.create_group

    def create(*args: Any, **kwargs: Any) -> Any:
        with unsorted_groups():
            return create_group(*args, **kwargs)

    with (
        replaced(parallel_state, "RankGenerator", MirroredRanks),
        replaced(parallel_state, "create_group", create),
    ):
        yield


@contextmanager
def unsorted_groups() -> Iterator[None]:
    """Let `torch.distributed.new_group` keep the order of its ranks within the block."""
    new_group: Callable[..., Any] = dist.new_group
    if "sort_ranks" in inspect.signature(new_group).parameters:
        with replaced(dist, "new_group", lambda *args, **kwargs: new_group(*args, **kwargs, sort_ranks=False)):
            yield
    else:
        with sorting_off():
            yield


@contextmanager
def sorting_off() -> Iterator[None]:
    """Replace the `sorted` that torch's module sees, so that it keeps the order; for torch 2.11, whose `new_group` has
    no choice."""
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` by `value` within the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
