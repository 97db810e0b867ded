"""Lets verl's FSDP engine of a language model compute logits at the positions of responses alone: prompts and padding
have none.

A forward pass gets `logits_to_keep`, an index of positions that models of transformers take, so that logits of all
positions are never made. verl's own code makes log-probs and entropies of these logits; both come back with a value for
each token of a row, as in verl, 0 where the engine computed none.

Invariants (tests/integration/test_response_logits.py):
- log-probs and entropies of responses, losses, gradients and parameters are verl's, up to rounding;
- packed and padded rows, and ranks that share a row (Ulysses), give the same;
- a rank without a response's token keeps one position: each model has a gradient, and no kernel gets an empty input.
"""

import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.engines import of_transformers
from verl_fuse.spec.composed import TOWERS

logger = logging.getLogger(__name__)

SWITCH = "fuse.update.response_logits"


class ResponseLogits(FSDPEngineWithLMHead):
    """verl's engine with logits of responses alone."""

    # Of the micro-batch that is computed: the kept positions of this rank's packed tokens, and the number of these.
    _kept: tuple[torch.Tensor, int]
    use_ulysses_sp: bool
    ulysses_parallel_group: Any

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return verl's inputs and `logits_to_keep`; what verl compares logits with is of the same positions."""
        stock: Any = super()
        inputs, arguments = stock.prepare_model_inputs(micro_batch)
        positions = response_positions(micro_batch)
        if get_non_tensor_data(micro_batch, "use_remove_padding", default=True):
            tokens = inputs["input_ids"].shape[1]
            first = dist.get_rank(self.ulysses_parallel_group) * tokens if self.use_ulysses_sp else 0
            positions = positions[(positions >= first) & (positions < first + tokens)] - first
            positions = positions if len(positions) else positions.new_zeros(1)
            inputs["logits_to_keep"] = positions
            arguments["temperature_rmpad"] = arguments["temperature_rmpad"][positions]
        else:
            tokens = len(micro_batch["input_ids"].values())
            positions = positions if len(positions) else positions.new_zeros(1)
            starts = micro_batch["input_ids"].offsets()
            rows = torch.searchsorted(starts, positions, right=True) - 1
            columns = positions - starts[rows]
            first = columns.min()
            inputs["logits_to_keep"] = torch.arange(int(first), int(columns.max()) + 1, device=columns.device)
            arguments |= {"places": (rows, columns - first), "columns": len(inputs["logits_to_keep"]), "pad_size": 0}
            arguments["temperature_rmpad"] = arguments["temperature"][rows]
        arguments["input_ids_rmpad_rolled"] = arguments["input_ids_rmpad_rolled"][positions]
        self._kept = positions, tokens
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Return verl's outputs, made of the kept positions' logits by verl's code for packed rows."""
        positions, _ = self._kept
        asked = output_args.get("columns", len(positions))
        if output.logits.shape[1] != asked:
            raise FuseError(
                f"{SWITCH}=true: the model gave logits of {output.logits.shape[1]} positions in place of {asked}; "
                "false computes those of all"
            )
        if (places := output_args.get("places")) is not None:
            output.logits = output.logits[places].unsqueeze(0)
            micro_batch = micro_batch.clone(recurse=False)
            assign_non_tensor(micro_batch, use_remove_padding=True)
        stock: Any = super()
        return stock.prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        """Put the values of the kept positions into their places among all tokens, then do as verl does."""
        stock: Any = super()
        positions, tokens = self._kept
        whole = tensor.new_zeros(tokens, *tensor.shape[1:]).index_copy(0, positions, tensor)
        return stock._gather_and_unpad_packed(whole, pad_size)


def response_positions(micro_batch: Any) -> torch.Tensor:
    """Return the positions among the packed tokens of a micro-batch at which a token of a response is predicted: one
    before it."""
    ends = micro_batch["input_ids"].offsets()[1:].tolist()
    answers = micro_batch["responses"].offsets().diff().tolist()
    ranges = [torch.arange(end - answer - 1, end - 1) for end, answer in zip(ends, answers, strict=True)]
    return torch.cat(ranges).to(micro_batch["input_ids"].device)


def keep_response_logits(engine: Any, strict: bool) -> None:
    """Let an engine of verl that is built compute logits of responses alone. One that cannot computes all of them, and
    a warning says so; with `strict` it is refused."""
    if found := " and ".join(_unfit(engine)):
        if strict:
            raise FuseError(f"{SWITCH}=true: not with {found}; false computes logits of all tokens")
        logger.warning("%s=true: without effect with %s: logits of all tokens are computed", SWITCH, found)
        return
    engine.__class__ = type(f"ResponseLogits{type(engine).__name__}", (ResponseLogits, type(engine)), {})


def _unfit(engine: Any) -> Iterator[str]:
    stock: Any = FSDPEngineWithLMHead
    # Engines of value heads are subclasses.
    if getattr(type(engine), "prepare_model_outputs", None) is not stock.prepare_model_outputs:
        yield f"the engine {type(engine).__name__}"
        return
    # verl replaces the forward pass of many such models by its own.
    if towers := [name for name in TOWERS if hasattr(engine.model_config.hf_config, name)]:
        yield f"a model that has {', '.join(towers)}"
    # Under FSDP and adapters the outermost model of transformers.
    model = next((type(part) for part in engine.module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        yield "a model that is none of transformers"
    elif "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield f"{model.__name__}, whose forward pass takes no logits_to_keep"
    elif not of_transformers(model):
        # It may take a number of tokens alone.
        yield f"{model.__name__}, whose code is not transformers'"


def response_logits_worker_class(base: type, strict: bool) -> type:
    """Return a subclass of verl's actor worker `base` whose actor and reference compute logits of responses alone;
    `strict`: a model that cannot is refused."""
    build = base.init_model  # type: ignore[attr-defined]

    @functools.wraps(build)
    def init_model(self: Any) -> None:
        build(self)
        for worker in filter(None, (self.actor, self.ref)):
            keep_response_logits(worker.engine, strict)

    return type(f"ResponseLogits{base.__name__}", (base,), {"__doc__": base.__doc__, "init_model": init_model})
