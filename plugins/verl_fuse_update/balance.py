"""Places the rows of an update on the data-parallel ranks, within each mini-batch.

verl balances a batch over ranks, and each rank cuts its own rows into mini-batches in their order: in each of these,
all ranks wait for the one with the most work, and samples of a prompt are on any of them. Where a rank computes a
prompt once for all its samples, they are put on one rank.

Invariants (tests/unit/update/test_update_balance.py):
- every mini-batch has the rows that verl gives it, and every rank as many of them as before;
- the slowest ranks of all mini-batches together have no more work than in verl's order, which stays where no other is
  better;
- a mini-batch that the ranks do not divide is left as it is: verl refuses it;
- the batch that goes on is verl's, whatever order its rows were trained in.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_fuse.host.inference.micro_groups import packed
from verl_fuse.host.record.step import StageMethod, StepStage, TrainerPart
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.spec.trajectory import TrajectoryKey
from verl_fuse_update.refusals import Model

# A model that is trained: its block of the configuration.
_TRAINED: dict[StepStage, Model] = {"update_actor": "actor", "update_critic": "critic"}


@dataclass(frozen=True)
class Cut:
    """How verl cuts a batch: over `ranks`, into mini-batches of `mini_batch` rows of all ranks, into micro-batches of
    `micro_batch` rows of one rank (None: by tokens, later, on the rank). `padded`: a micro-batch computes each of its
    rows as long as its longest."""

    ranks: int
    mini_batch: int
    micro_batch: int | None = None
    padded: bool = False

    @property
    def part(self) -> int:
        """Return the rows of a rank in each mini-batch."""
        return self.mini_batch // self.ranks

    @property
    def turn(self) -> int:
        """Return the rows that a rank computes before it waits for others."""
        return self.micro_batch or self.part

    def divides(self, rows: int) -> bool:
        """Tell whether verl can cut so many rows like this."""
        return rows % self.mini_batch == 0 and self.mini_batch % self.ranks == 0 and self.part % self.turn == 0

    def places(self, rows: int) -> list[list[list[int]]]:
        """Return the places in a batch of so many rows, by mini-batch and rank."""
        share = rows // self.ranks
        return [
            [list(range(rank * share + start, rank * share + start + self.part)) for rank in range(self.ranks)]
            for start in range(0, share, self.part)
        ]

    def first(self, rows: int) -> list[int]:
        """Return the places of the first mini-batch's rows, rank by rank."""
        return [place for rank in self.places(rows)[0] for place in rank]

    def amount(self, work: Sequence[int], order: Sequence[int], prompts: "Prompts | None" = None) -> int:
        """Return the work of the slowest ranks, all turns together: `work` by row, in this order of rows."""
        return sum(
            max(
                self._computed(work, [order[place] for place in rank[start : start + self.turn]], prompts)
                for rank in ranks
            )
            for ranks in self.places(len(order))
            for start in range(0, self.part, self.turn)
        )

    def _computed(self, work: Sequence[int], rows: Sequence[int], prompts: "Prompts | None") -> int:
        if prompts is not None:
            return prompts.work(work, rows)
        each = [work[row] for row in rows]
        return len(each) * max(each) if self.padded and self.micro_batch else sum(each)


@dataclass(frozen=True)
class Prompts:
    """The prompts that are computed once for rows of the same one of `groups` that a rank has together; `shared` is the
    part of each row's work that they share."""

    groups: Sequence[Hashable]
    shared: Sequence[int]

    def work(self, work: Sequence[int], rows: Sequence[int]) -> int:
        """Return the work of these rows together; a row without work needs no prompt."""
        computed = [row for row in rows if work[row]]
        prompts = {self.groups[row]: self.shared[row] for row in computed}
        return sum(work[row] - self.shared[row] for row in computed) + sum(prompts.values())


def balanced(work: Sequence[int], cut: Cut, prompts: Prompts | None = None) -> list[int]:
    """Return the order of rows, whose `work` is 0 where nothing is computed: the next share of each rank, and in it of
    each mini-batch, has an even part of the mini-batch's work."""
    stock = list(range(len(work)))
    if not cut.divides(len(work)):
        # verl's assertions name the numbers.
        return stock

    def ordered(of_ranks: Callable[[list[int]], list[list[int]]]) -> list[int]:
        order = list(stock)
        for places in cut.places(len(work)):
            found = of_ranks([row for rank in places for row in rank])
            for place, row in zip(chain(*places), chain(*found), strict=True):
                order[place] = row
        return order

    orders = [stock, ordered(partial(_of_ranks, work, cut))]
    if prompts is not None:
        orders.append(ordered(partial(_whole_groups, work, cut, prompts)))
    return min(orders, key=lambda order: cut.amount(work, order, prompts))


def share_saved(work: Sequence[int], order: Sequence[int], cut: Cut, prompts: Prompts | None = None) -> float:
    """Return the share of the slowest ranks' work in verl's order that this order saves."""
    before = cut.amount(work, range(len(work)), prompts) if cut.divides(len(work)) else 0
    return 1 - cut.amount(work, order, prompts) / before if before else 0.0


def _of_ranks(work: Sequence[int], cut: Cut, rows: list[int]) -> list[list[int]]:
    """Return the rows of each rank, turn by turn, for the `rows` of one mini-batch."""
    turns = cut.part // cut.turn
    if cut.padded and cut.micro_batch:
        # Rows of about the same length share a micro-batch, which computes as little padding as any cut leaves, and all
        # ranks have theirs in the same turn.
        ranked = sorted(rows, key=lambda row: -work[row])
        parts = [ranked[start : start + cut.turn] for start in range(0, len(ranked), cut.turn)]
    else:
        # As much work in each: sorted rows would put the longest into one micro-batch, and raise the peak of memory.
        found: Any = get_seqlen_balanced_partitions([work[row] for row in rows], cut.ranks * turns, equal_size=True)
        parts = [[rows[place] for place in part] for part in found]
        parts = sorted(parts, key=lambda part: -sum(work[row] for row in part)) if turns > 1 else parts
    return [[row for part in parts[rank :: cut.ranks] for row in part] for rank in range(cut.ranks)]


def _whole_groups(work: Sequence[int], cut: Cut, prompts: Prompts, rows: list[int]) -> list[list[int]]:
    """Return the rows of each rank for the `rows` of one mini-batch, with samples of a prompt on one rank as long as it
    has room for them, the largest groups first."""
    groups: dict[Hashable, list[int]] = {}
    # Rows without work fill what is left.
    for row in sorted(rows, key=lambda row: not work[row]):
        groups.setdefault(prompts.groups[row] if work[row] else (row,), []).append(row)
    return packed(list(groups.values()), cut.ranks, cut.part, partial(prompts.work, work))


def work_of(batch: KVBatchMeta) -> list[int]:
    """Return the work of each row, as verl counts it: proportional to a model's operations."""
    return calculate_workload(torch.tensor([int(tag["seq_len"]) for tag in batch.tags])).tolist()


def prompts_of(batch: KVBatchMeta) -> Prompts:
    """Return the prompts of a batch's rows; each row of padding has its own. A later turn of a conversation is taken to
    begin with its first prompt, unless it is shorter; workers compare the tokens."""
    lengths = [int(tag["prompt_len"]) for tag in batch.tags]
    parsed = [
        None if tag.get("is_padding") else TrajectoryKey.parse(key)
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    first = {key.uid: length for key, length in zip(parsed, lengths, strict=True) if key and not key.index}
    groups: list[Hashable] = []
    for place, key in enumerate(parsed):
        if key is None or (key.index and lengths[place] < first.get(key.uid, math.inf)):
            groups.append(batch.keys[place])
            continue
        lengths[place] = first[key.uid] if key.index else lengths[place]
        groups.append((key.uid, lengths[place]))
    # A prompt's last token is computed for each of its samples.
    return Prompts(groups, calculate_workload(torch.tensor(lengths) - 1).tolist())


def in_order(batch: KVBatchMeta, order: Sequence[int]) -> KVBatchMeta:
    """Return the batch with its rows in this order; what a stage writes into it stays there."""
    keys, tags = [batch.keys[place] for place in order], [batch.tags[place] for place in order]
    return replace(batch, keys=keys, tags=tags, extra_info=dict(batch.extra_info or {}))


def cut_of(trainer: Any, model: Model, packed: bool = False) -> Cut:
    """Return how verl cuts the batch of this model's update; `packed`: its rows are, whatever the configuration
    says."""
    config = trainer.config
    samples = config.actor_rollout_ref.rollout.n
    if model == "critic":
        # verl's trainer cuts the critic's micro-batches by tokens, whatever its block says.
        return Cut(data_parallel_size(trainer.critic_wg, "train"), config.critic.ppo_mini_batch_size * samples)
    actor = config.actor_rollout_ref.actor
    return Cut(
        data_parallel_size(trainer.actor_rollout_wg, "actor"),
        actor.ppo_mini_batch_size * samples,
        None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        not (packed or config.actor_rollout_ref.model.use_remove_padding),
    )


class BalancedUpdates(TrainerPart):
    """Balances the updates of these models of `trainer` within mini-batches."""

    def __init__(self, trainer: Any, models: Sequence[Model]) -> None:
        self._trainer, self._models = trainer, models

    def method(self, stage: StepStage, stock: StageMethod) -> StageMethod:
        """Return verl's update on rows that are placed anew."""
        model = _TRAINED.get(stage)
        return partial(self._update, model, stock) if model and model in self._models else stock

    def _update(self, model: Model, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        cut, work = cut_of(self._trainer, model), work_of(batch)
        order = balanced(work, cut)
        stock(in_order(batch, order), metrics)
        metrics[f"fuse/{model}_balance_saved"] = share_saved(work, order, cut)
        return batch
