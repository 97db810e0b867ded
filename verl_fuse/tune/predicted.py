"""Predicts what other values of settings do to a recorded run: into how many micro-batches its samples are cut, and,
with a cost model, the seconds and the memory of the stages that are cut otherwise or keep other activations, and the
seconds of generation with more or fewer requests at once.

A stage takes its recorded seconds times the ratio of the model's seconds, with the change and without: what the model
gets wrong alike for both is in neither.

Invariants (tests/unit/tune/test_predicted.py):
- micro-batches are counted as verl cuts them, from the lengths of the recorded samples, without a cost model;
- a change that cuts every stage as before, and keeps the same activations, saves nothing;
- nothing is told of a setting that is no size of micro-batches, keeps no activations and limits no requests, nor of
  training engines other than FSDP.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.floors import generation_seconds
from verl_fuse.cost.model import Batch
from verl_fuse.cost.recorded import RecordedStep, requests_at_once
from verl_fuse.spec.arrays import Ints
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    FSDP_BLOCKS,
    MODEL,
    ROLLOUT,
    Get,
    data_parallel_ranks,
    getter,
    has_adapters,
    has_key,
    on_accelerators,
    sequence_ranks,
)
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.micro_batches import MICRO_BATCHES
from verl_fuse.spec.model import Model
from verl_fuse.spec.timeline import GENERATION, OLD_LOG_PROB, TRAIN_STAGES
from verl_fuse.tune.setting import Value


def model_block(role: str) -> str:
    """Return the block of a role's model; actor and reference share one."""
    return f"{CRITIC}.model" if role == CRITIC else MODEL


# Flags of a role's model.
FLAGS = (_KEPT, _UNPADDED) = ("enable_gradient_checkpointing", "use_remove_padding")
_REQUESTS, _TP = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.tensor_model_parallel_size"
# The keys that decide on micro-batches, activations and requests.
KEYS = frozenset(
    [
        _REQUESTS,
        *(key for keys in MICRO_BATCHES.values() for key in (keys.by_tokens, keys.tokens, keys.rows)),
        *(f"{model_block(role)}.{name}" for role in (ACTOR, CRITIC) for name in FLAGS),
    ]
) - {""}


@dataclass(frozen=True)
class RecordedWork:
    """A recorded run: its configuration, the mean seconds of its stages, and of each step its requests. `models`
    returns the model of a role."""

    config: DictConfig
    stages: Mapping[str, float]
    steps: Sequence[RecordedStep]
    models: Callable[[str], Model]

    @property
    def get(self) -> Get:
        return getter(self.config)

    @contextmanager
    def changed(self, changes: Mapping[str, Value]) -> Iterator[Get]:
        """Give keys other values within the block, which others may follow; a copy would take a second."""
        before: dict[str, Any] = {}
        for key in (key for key in changes if has_key(self.config, key)):
            parent, _, name = key.rpartition(".")
            # Not what an interpolation resolves to.
            before[key] = OmegaConf.select(self.config, parent)._get_node(name)._value()
        try:
            for key, value in changes.items():
                OmegaConf.update(self.config, key, value, force_add=True)
            yield self.get
        finally:
            for key in changes:
                if key in before:
                    OmegaConf.update(self.config, key, before[key])
                else:
                    parent, _, name = key.rpartition(".")
                    block = OmegaConf.select(self.config, parent)
                    with open_dict(block):
                        del block[name]


@dataclass(frozen=True)
class Effect:
    """What a change does to a recorded run: micro-batches of a rank in a step before and after, of the stages that it
    changes; seconds a step that it saves, and bytes by which a rank's activations grow at most, None without a cost
    model."""

    before: float
    after: float
    seconds: float | None
    more_bytes: float | None


@dataclass(frozen=True)
class _Work:
    """Of a stage and step: the samples as computed, updates, micro-batches of each on a rank, whether activations are
    computed again, and how often the samples are gone through."""

    batch: Batch
    updates: int
    micro_batches: int
    recompute: bool
    epochs: int

    @property
    def calls(self) -> int:
        return self.updates * self.micro_batches * self.epochs


def effect(run: RecordedWork, changes: Mapping[str, Value], cost: AnalyticCost | None) -> Effect | None:
    """Return what a change of these keys does; None where it is not known."""
    if not changes.keys() & KEYS or has_adapters(run.get):
        return None
    one, most = _works(run, run.get), requests_at_once(run.get)
    with run.changed(changes) as changed:
        other, more = _works(run, changed), requests_at_once(changed)
    served = _served(run, most, more, cost)
    if not changes.keys() & KEYS - {_REQUESTS}:
        return None if served is None else Effect(0.0, 0.0, served, 0.0)
    if one is None or other is None:
        return None
    works = {stage: [*zip(one[stage], other[stage], strict=True)] for stage in one if one[stage] != other[stage]}
    before, after = (
        sum(pair[index].calls for pairs in works.values() for pair in pairs) / len(run.steps) for index in (0, 1)
    )
    if works and cost is None:
        return Effect(before, after, None, None)
    found = [_predicted(run, cost, stage, pairs) for stage, pairs in works.items()] if cost is not None else []
    saved = (served or 0.0) + sum(seconds for seconds, _ in found)
    return Effect(before, after, saved, max([0.0, *(more for _, more in found)]))


def _served(run: RecordedWork, most: int | None, more: int | None, cost: AnalyticCost | None) -> float | None:
    """Return the seconds a step that generation takes less with `more` requests at once on a replica than with `most`;
    None where it is not known."""
    if cost is None or GENERATION not in run.stages:
        return None
    model, tp, costs = run.models(ACTOR), run.get(_TP) or 1, cost

    def seconds(limit: int | None) -> float:
        return sum(generation_seconds(step, model, costs, tp, limit) for step in run.steps)

    return 0.0 if most == more else run.stages[GENERATION] * (1 - seconds(more) / seconds(most))


def _works(run: RecordedWork, get: Get) -> dict[str, list[_Work]] | None:
    """Return the work of each stage and step that the run made; None where it is not known."""
    found: dict[str, list[_Work]] = {}
    for stage in (stage for stage in MICRO_BATCHES if run.stages.get(stage)):
        for step in run.steps:
            if (work := _work(get, stage, step.lengths)) is None:
                return None
            found.setdefault(stage, []).append(work)
    return found


def _work(get: Get, stage: str, lengths: Ints) -> _Work | None:
    """Return how verl computes these samples in a stage (verl.workers.engine.utils.prepare_micro_batches)."""
    keys = MICRO_BATCHES[stage]
    role = keys.role
    ranks, shared = data_parallel_ranks(get, role), sequence_ranks(get, role)
    updates = _updates(get, role) if stage in TRAIN_STAGES else 1
    if get(f"{role}.strategy") not in ("fsdp", "fsdp2") or not ranks or not shared or not updates:
        return None
    rows, batch = math.ceil(len(lengths) / (ranks * updates)), Batch.of(lengths)
    block = model_block(role)
    unpadded, recompute = get(f"{block}.{_UNPADDED}"), bool(get(f"{block}.{_KEPT}")) and stage in TRAIN_STAGES
    if not keys.by_tokens or get(keys.by_tokens):
        budget = get(keys.tokens) or keys.default
        if not isinstance(budget, int):
            return None
        count = min(rows, math.ceil(batch.tokens / (ranks * updates) / (budget * shared)))
        size = math.ceil(rows / count)
    else:
        size = get(keys.rows)
        if not isinstance(size, int) or size < 1:
            return None
        count = math.ceil(rows / size)
    if not unpadded:
        # Which rows come together in a micro-batch is not known: as many as it has on average, in their order.
        computed = Batch.padded(lengths, size)
    elif on_accelerators(get):
        computed = batch
    else:
        # Without flash attention a packed micro-batch is one sequence with a mask.
        computed = batch.masked(ranks * updates * count)
    epochs = get(f"{role}.ppo_epochs") if stage in TRAIN_STAGES else None
    return _Work(computed, updates, count, recompute, epochs or 1)


def _updates(get: Get, role: str) -> int | None:
    """Return the mini-batches of a step."""
    prompts, size = get("data.train_batch_size"), get(f"{role}.ppo_mini_batch_size")
    return max(1, prompts // size) if prompts and size else None


def _predicted(
    run: RecordedWork, cost: AnalyticCost, stage: str, pairs: Sequence[tuple[_Work, _Work]]
) -> tuple[float, float]:
    """Return (the seconds a step that a stage saves, the bytes by which its activations grow)."""
    role, trains = MICRO_BATCHES[stage].role, stage in TRAIN_STAGES
    model, layout = run.models(role), _layout(run.get, role)

    def seconds(work: _Work) -> float:
        if not trains:
            entropy = stage == OLD_LOG_PROB
            return cost.infer(model, layout, work.batch, work.micro_batches, entropy=entropy)
        count = work.micro_batches
        return cost.train(model, layout, work.batch, work.updates, count, recompute=work.recompute)

    ratio = sum(seconds(other) for _, other in pairs) / sum(seconds(one) for one, _ in pairs)
    more = max(_activations(run, cost, stage, other) - _activations(run, cost, stage, one) for one, other in pairs)
    return run.stages[stage] * (1 - ratio), more


def _activations(run: RecordedWork, cost: AnalyticCost, stage: str, work: _Work) -> float:
    """Return the bytes of a micro-batch's activations on a rank."""
    role, kind = MICRO_BATCHES[stage].role, "train" if stage in TRAIN_STAGES else "infer"
    layout = _layout(run.get, role)
    part = work.batch.split(layout.dp * work.updates * work.micro_batches)
    return cost.memory(run.models(role), kind, layout, microbatch=part, recompute=work.recompute).activations


def more_at_limits(run: RecordedWork, changes: Mapping[str, Value], cost: AnalyticCost) -> float | None:
    """Return the bytes by which a rank's activations grow from the recorded run's samples, on average over a stage's
    micro-batches, to samples of the longest prompts and responses computed with these changes; None where it is not
    known."""
    limits = [run.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    if not all(isinstance(limit, int) for limit in limits):
        return None
    step, samples = run.steps[0], len(run.steps[0].responses)
    longest = replace(step, prompts=(limits[0],) * samples, responses=(limits[1],) * samples)
    before = _works(run, run.get)
    with run.changed(changes) as changed:
        after = _works(replace(run, steps=(longest,)), changed)

    def most(works: Mapping[str, Sequence[_Work]]) -> float:
        return max(_activations(run, cost, stage, work) for stage in works for work in works[stage])

    return most(after) - most(before) if before and after else None


def _layout(get: Get, role: str) -> Layout:
    """Return the layout of a role's FSDP engine, whose ranks are known."""
    ranks, shared = data_parallel_ranks(get, role) or 1, sequence_ranks(get, role) or 1
    shards = get(f"{role}.{FSDP_BLOCKS[role]}.fsdp_size") or -1
    return Layout(dp=ranks, cp=shared, shards=shards if shards > 0 else ranks * shared)
