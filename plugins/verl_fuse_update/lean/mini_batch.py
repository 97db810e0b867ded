"""Computes one mini-batch of a lean update on one rank: verl's engine computes fewer rows of it, and everything else is
as if it had computed all.

The engine gets the whole mini-batch and reads from it the numbers that divide its losses. Only the split into
micro-batches is replaced.

Invariants (tests/integration/test_lean_engines.py):
- rows are left out only where every advantage that counts is exactly 0; where no rank has any, verl's own split is
  used;
- denominators, optimizer steps and learning rates are verl's; every parameter has a gradient when the optimizer steps;
- old log-probs that no pass computed are the model's own: of the first mini-batch, before any step of the update, in
  later epochs too; of a sample without a gradient, whose ratio is then 1;
- metrics are verl's loss function on verl's own micro-batches (`stock`), or on all computed rows at once (`computed`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data
from verl.workers.utils.padding import response_from_nested

from verl_fuse.host.sharing.micro_batches import by_rows, by_tokens, largest_of
from verl_fuse.host.sharing.plan import KEYS_FIELD, row_prompts
from verl_fuse.host.upstream.advantages import has_gradient
from verl_fuse.host.weights.gathered import reshard
from verl_fuse_update.lean.options import NO_ROW, ROW_FIELD, LeanOptions
from verl_fuse_update.lean.rows import Outputs, lengths, nested, selected, without_weight

# Rows of logits whose entropy is computed at a time, as many as verl's own chunks have.
ENTROPY_ROWS = 2048
# verl's name of the entropy that an update reports.
_ENTROPY = "actor/entropy_loss"
Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class LeanMiniBatch:
    """A mini-batch with `loss`, verl's loss function; `fresh`: parameters are still the ones that the batch's old
    log-probs were computed with; `first` has outputs of the update's first mini-batch, if that computed old
    log-probs."""

    def __init__(
        self, engine: Any, data: Any, options: LeanOptions, loss: Loss, fresh: bool, first: Outputs | None = None
    ) -> None:
        self._engine, self._data, self._options, self._loss = engine, data, options, loss
        self._fresh, self._first = fresh and not options.bypass, first or {}
        self._group = engine.get_data_parallel_group()
        self._largest = largest_of(self._group)
        self.own = options.skip_old_log_prob and fresh
        self._entropy = bool(get_non_tensor_data(data, "calculate_entropy", default=False))
        short, every = options.skip_old_log_prob and options.short_pass, [True] * len(data)
        found = has_gradient(data) if options.skip_zero_gradient or short else every
        keep, passed = found if options.skip_zero_gradient else every, found if short else every
        self._kept = [row for row, kept in enumerate(keep) if kept]
        self._rest = [row for row, kept in enumerate(keep) if not kept]
        self._not_passed = {row for row, one in zip(data[ROW_FIELD].tolist(), passed, strict=True) if not one}
        self._skips = bool(self._largest(len(self._rest)))
        # The model's output for each computed row, by the row's place; and for any row, of this rank or none.
        self.outputs: dict[int, dict[str, torch.Tensor]] = {}
        self.like: dict[str, torch.Tensor] = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the engine compute only the rows that have a gradient, within the block."""
        with ExitStack() as stack:
            if self.own:
                stack.enter_context(self._with_entropy())
            if self._skips:
                stack.enter_context(_replaced(_module_of(self._engine), "prepare_micro_batches", self._split))
                stack.enter_context(_replaced(self._engine, "optimizer_step", self._step))
            yield

    def loss(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        """Return verl's loss of a micro-batch, and note its log-probs."""
        self._note(model_output, data)
        return self._loss(model_output=self._known(model_output, data), data=data, dp_group=dp_group)

    def report(self, output: dict[str, Any]) -> None:
        """Put the losses and metrics of the mini-batch into the engine's output."""
        if not self._skips:
            return
        with torch.no_grad():
            losses, metrics = self._of_all() if self._options.metrics == "stock" else self._of_computed()
        kept = {key: output["metrics"][key] for key in ("grad_norm", "lr") if key in output["metrics"]}
        output["loss"], output["metrics"] = losses, metrics | kept

    def computed_tokens(self) -> list[int]:
        """Return the length of each computed row, of all ranks."""
        mine = lengths(self._data)
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, [mine[row] for row in self._kept], group=self._group)
        return [length for rank in found for length in rank]

    # -- while the engine computes

    def _split(self, stock: Any, data: Any, **request: Any) -> tuple[list[Any], list[list[int]]]:
        """Return the micro-batches of the rows that have a gradient, in place of verl's `prepare_micro_batches`."""
        self._stock_split = partial(stock, data, **request)
        return self._micro_batches(self._kept, data, **request)

    def _micro_batches(
        self, rows: Sequence[int], data: Any, num_batches_divided_by: int | None = None, **_: Any
    ) -> tuple[list[Any], list[list[int]]]:
        multiple, mine = num_batches_divided_by or 1, lengths(data)
        if get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            most = data["max_token_len_per_gpu"] * get_non_tensor_data(data, "sp_size", default=1)
            prompts = row_prompts(data)
            chosen = [prompts[row] for row in rows] if prompts else None
            keys: Any = get_non_tensor_data(data, KEYS_FIELD, default=1)
            parts = by_tokens([mine[row] for row in rows], most, self._largest, multiple, chosen, keys)
        else:
            parts = by_rows(len(rows), data["micro_batch_size_per_gpu"], self._largest, multiple)
        shortest = min(range(len(mine)), key=mine.__getitem__)
        batches = [
            selected(data, [rows[place] for place in part]) if part else without_weight(selected(data, [shortest]))
            for part in parts
        ]
        ends = list(accumulate(map(len, batches), initial=0))
        return batches, [list(range(*pair)) for pair in pairwise(ends)]

    def _step(self, stock: Callable[[], Any]) -> Any:
        """Compute, before the optimizer steps, the passes that metrics need of the rows left out, and give every
        parameter a gradient."""
        if self._options.metrics == "stock" and (self.own or self._entropy or not self._fresh):
            self.forward_rest()
        if fsdp_version(self._engine.module):
            for parameter in self._engine.module.parameters():
                # FSDP1 with use_orig_params: a parameter of which this rank has no part never has a gradient.
                if parameter.requires_grad and parameter.grad is None and parameter.numel():
                    parameter.grad = torch.zeros_like(parameter)
        return stock()

    def forward_rest(self) -> None:
        """Let the rows that are left out go through a forward pass."""

        def split(_stock: Any, data: Any, **request: Any) -> tuple[list[Any], list[list[int]]]:
            return self._micro_batches(self._rest, data, **request)

        owner = _module_of(self._engine)
        with torch.no_grad(), _evaluating(self._engine), _replaced(owner, "prepare_micro_batches", split):
            self._engine.forward_backward_batch(self._data, self._only_note, forward_only=True)

    def _only_note(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        self._note(model_output, data)
        return torch.zeros((), device=get_device_name()), {}

    @contextmanager
    def _with_entropy(self) -> Iterator[None]:
        """Compute the entropy that the left-out pass would have reported: no update trains on it, so that no gradient
        of it is prepared."""
        assign_non_tensor(self._data, calculate_entropy=True)
        with ExitStack() as stack:
            if not self._entropy and hasattr(self._engine, "compute_entropy_from_logits"):
                stack.enter_context(_replaced(self._engine, "compute_entropy_from_logits", without_gradient))
            yield

    def _note(self, model_output: dict[str, Any], data: Any) -> None:
        found = {key: model_output[key].detach().unbind() for key in ("log_probs", "entropy") if key in model_output}
        for place, row in enumerate(data[ROW_FIELD].tolist()):
            self.like = {key: rows[place] for key, rows in found.items()}
            if row != NO_ROW:
                self.outputs[row] = self.like

    def _known(self, model_output: dict[str, Any], data: Any) -> dict[str, Any]:
        """Return the model's output as verl's update would have it, and set the batch's old log-probs where they are
        the update's own."""
        if self._options.skip_old_log_prob:
            data["old_log_probs"] = self._old_log_probs(model_output["log_probs"].detach(), data)
        return {key: value for key, value in model_output.items() if key != "entropy" or self._entropy}

    def _old_log_probs(self, log_probs: torch.Tensor, data: Any) -> torch.Tensor:
        mine = response_from_nested(log_probs, data["response_mask"])
        if self.own:
            return mine
        found = []
        passed = data["old_log_probs"].unbind() if "old_log_probs" in data else mine.unbind()
        for row, own, other in zip(data[ROW_FIELD].tolist(), mine.unbind(), passed, strict=True):
            if row in self._first:
                # Log-probs of a response begin one token before it.
                other = self._first[row]["log_probs"][-len(own) - 1 : -1]
            elif row in self._not_passed:
                other = own
            found.append(other.to(passed[0].dtype))
        return nested(found)

    # -- metrics

    def _of_all(self) -> tuple[list[float], dict[str, Any]]:
        """Return losses and metrics as verl has them: a value for each of its own micro-batches."""
        batches, _ = self._stock_split()
        losses, metrics = [], {}
        for batch in batches:
            loss, found = self._evaluated(batch)
            losses.append(loss)
            append_to_dict(metrics, found)
        return losses, metrics

    def _of_computed(self) -> tuple[list[float], dict[str, Any]]:
        """Return one value of this rank for losses and metrics; means weigh as many tokens as they are of. The entropy,
        which verl divides by all tokens or samples, is of those that are computed."""
        batch = selected(self._data, self._kept) if self._kept else without_weight(selected(self._data, [0]))
        tokens = float(batch["response_mask"].values().sum())
        total = torch.tensor([tokens, len(self._kept)], dtype=torch.float64, device=get_device_name())
        dist.all_reduce(total, group=self._group)
        all_tokens, samples = (max(count, 1.0) for count in total.tolist())
        weight = tokens * dist.get_world_size(self._group) / all_tokens
        loss, found = self._evaluated(batch)
        if self._entropy:
            assign_non_tensor(batch, batch_num_tokens=all_tokens, global_batch_size=samples)
            found |= {key: value for key, value in self._evaluated(batch)[1].items() if key == _ENTROPY}
        metrics: dict[str, Any] = {}
        for key, value in found.items():
            if isinstance(value, Metric) and value.aggregation is AggregationType.MEAN:
                value = Metric(value.aggregation, value.aggregate() * weight)
            append_to_dict(metrics, {key: value})
        return [loss], metrics

    def _evaluated(self, batch: Any) -> tuple[float, dict[str, Any]]:
        batch = batch.to(get_device_name())
        found = [
            self.outputs.get(row) or self._as_before(batch, place)
            for place, row in enumerate(batch[ROW_FIELD].tolist())
        ]
        model_output = {key: nested([row[key] for row in found]) for key in found[0]}
        loss, metrics = self._loss(model_output=self._known(model_output, batch), data=batch, dp_group=None)
        return loss.item(), metrics

    def _as_before(self, batch: Any, place: int) -> dict[str, torch.Tensor]:
        """Return the model's output for a row that was not computed: under the same parameters, its old log-probs."""
        length, answer = lengths(batch)[place], len(batch["response_mask"].unbind()[place])
        # Rows that were computed share a tensor with it, and have the model's precision.
        kind = self.like["log_probs"].dtype if self.like else None
        log_probs = torch.zeros(length, dtype=kind, device=get_device_name())
        if "old_log_probs" in batch:
            log_probs[length - answer - 1 : length - 1] = batch["old_log_probs"].unbind()[place]
        return {"log_probs": log_probs} | ({"entropy": torch.zeros_like(log_probs)} if self._entropy else {})


def _module_of(engine: Any) -> Any:
    """Return the module in which the engine's class looks for `prepare_micro_batches`; the classes that this project
    puts on top call it."""
    kinds = [kind for kind in type(engine).__mro__ if kind.__module__.split(".")[0] != "verl_fuse"]
    (owner, *_) = [kind for kind in kinds if "forward_backward_batch" in vars(kind)]
    return sys.modules[owner.__module__]


@contextmanager
def _evaluating(engine: Any) -> Iterator[None]:
    """Put the model out of training between the last backward pass and the optimizer, and afterwards leave it as that
    pass left it.

    Activations that are offloaded are counted in training only, and without a backward pass FSDP leaves parameters
    gathered.
    """
    models = engine.module if isinstance(engine.module, list) else [engine.module]
    for model in models:
        model.eval()
    yield
    for model in models:
        model.train()
        reshard(model)


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace `owner.name` by `function` within the block; `function` gets the replaced function first."""
    stock, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, partial(function, stock))
    try:
        yield
    finally:
        setattr(owner, name, stock) if own else delattr(owner, name)


def without_gradient(stock: Callable[..., Any], logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return verl's entropy of each row of logits (tokens x words) without a gradient, with a copy of a few rows at a
    time."""
    with torch.no_grad():
        return torch.cat([stock(rows, *args, **kwargs) for rows in logits.split(ENTROPY_ROWS)])
