"""Runs a pass before an update for the rows that need it: the update's first mini-batch is trained with the weights of
the pass, and computes the same for its own rows.

Invariants (tests/integration/test_lean_driver.py, test_critic_first.py):
- rows that need no pass and are not of the first mini-batch may be left out, and no others;
- every rank gets as many rows, in whole micro-batches: the shortest other rows fill them;
- where the pass computed anything, the rows that left it have the column, too, which is 0: TransferQueue drops a column
  that one row lacks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_fuse.host.upstream.advantages import without_gradient
from verl_fuse.host.upstream.rows import TRAIN, read
from verl_fuse.spec.timeline import ZERO_GRADIENT_TOKENS
from verl_fuse_update.balance import Cut, balanced, in_order, work_of


@dataclass(frozen=True)
class ShortPass:
    """The rows (keys) that have their numbers after the update; the share of the tokens that left the pass, padding not
    counted."""

    known: list[str]
    share: float


def run_short_pass(
    batch: KVBatchMeta,
    cut: Cut,
    micro_batch: int,
    needs: Sequence[bool],
    column: str,
    run: Callable[[KVBatchMeta], object],
) -> ShortPass:
    """Let `run`, which writes `column`, run for rows of `batch`, which an update cuts by `cut`. `needs` tells for each
    row whether the update needs its numbers, if it is of a later mini-batch; a rank takes multiples of
    `micro_batch`."""
    places, work, first = range(len(batch)), work_of(batch), set(cut.first(len(batch)))
    wanted = {place for place in places if place not in first and needs[place]}
    spare = sorted(set(places) - wanted, key=lambda place: (place in first, work[place]))
    wanted |= set(spare[: -len(wanted) % (cut.ranks * micro_batch)])
    passed, left = sorted(wanted), [place for place in places if place not in wanted]
    if passed:
        order = balanced([work[place] for place in passed], Cut(cut.ranks, len(passed)))
        run(in_order(batch, [passed[place] for place in order]))
    if passed and left:
        _write_zeros(in_order(batch, left), in_order(batch, passed[:1]), column)
    share = without_gradient(batch, [place in wanted for place in places])[ZERO_GRADIENT_TOKENS]
    return ShortPass([batch.keys[place] for place in sorted(first | wanted)], share)


def _write_zeros(batch: KVBatchMeta, like: KVBatchMeta, column: str) -> None:
    """Write a 0 for each response token of these rows, in the precision of the rows `like`."""
    kind = read(like, [column])[column].dtype
    mask = read(batch, ["response_mask"])["response_mask"]
    zeros = torch.nested.nested_tensor_from_jagged(torch.zeros(mask.values().shape, dtype=kind), mask.offsets())
    found = TensorDict({column: zeros}, batch_size=[len(batch)])
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id or TRAIN, fields=found)
