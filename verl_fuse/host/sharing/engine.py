"""Lets verl's FSDP engine of a language model, or of a critic, compute the prompt of several samples once.

verl's own code prepares the inputs of the rows that are computed (`SharedPlan`) and makes log-probs and entropies, or
values, of them; they come back as verl has them, with a value for each token of each sample. The loss is verl's, on
verl's rows.

Invariants (tests/integration/test_shared_prompts.py):
- log-probs, entropies, losses, gradients and parameters are verl's, up to rounding;
- with dynamic batch sizes, rows of a prompt are in one micro-batch, unless they exceed its limit, or this rank has
  fewer prompts than micro-batches;
- rows with prompts of the same tokens share, whatever uid they have;
- a layer that does not attend by the plan, whose rows would see each other, ends the step.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from transformers import PreTrainedModel
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data, index_select_tensor_dict
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_fuse.errors import FuseError
from verl_fuse.host.sharing.attention import FLASH, NAME
from verl_fuse.host.sharing.micro_batches import by_tokens, largest_of
from verl_fuse.host.sharing.plan import GROUP_FIELD, KEYS_FIELD, SharedPlan, prompt_groups, row_prompts, shared_tokens
from verl_fuse.host.upstream.engines import of_transformers

logger = logging.getLogger(__name__)

SWITCH = "fuse.update.share_prompts"
# How many times the limit of a micro-batch its whole rows may have, where one layer at a time has gathered their keys
# and values.
KEYS = 4
# Models of transformers whose attention takes all of a call's arguments, and whose layers are of each token alone
# otherwise.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3_text")
# Positions that depend on the longest row of a call, of which sharing makes another one.
_RELATIVE = {"dynamic", "longrope"}
# The module in which verl's engine looks for `prepare_micro_batches`.
_module: Any = sys.modules[FSDPEngineWithLMHead.__module__]
_split = _module.prepare_micro_batches


class SharedPrompts(FSDPEngineWithLMHead):
    """verl's engine with prompts that are computed once."""

    _kernel: str
    _recomputes: bool
    _layers: int
    # In the rows since these were last asked for: tokens, those of prompts, and those of prompts that were computed.
    _tokens: tuple[int, int, int]
    # Of the micro-batch that is computed.
    _plan: SharedPlan
    _compact: TensorDict

    def share(self, kernel: str, layers: int, recomputes: bool) -> None:
        """Begin, with a model of so many layers that was built with the attention `kernel`; `recomputes`: they keep
        nothing for the backward pass."""
        self._kernel, self._layers, self._recomputes, self._tokens = kernel, layers, recomputes, (0, 0, 0)

    def forward_backward_batch(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch as verl does, in micro-batches that keep rows of a prompt together."""
        forward_only = kwargs.get("forward_only", args[1] if len(args) > 1 else False)
        data[GROUP_FIELD] = prompt_groups(data)
        assign_non_tensor(data, **{KEYS_FIELD: KEYS if forward_only or self._recomputes else 1})
        stock: Any = super()
        with self._whole_groups(data):
            return stock.forward_backward_batch(data, *args, **kwargs)

    @contextmanager
    def _whole_groups(self, data: Any) -> Iterator[None]:
        """Split by prompts in place of verl, unless an update that leaves rows out does, which knows prompts itself.
        Micro-batches of a fixed size stay verl's: it does not put their rows back in order."""
        fixed = not get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        if fixed or _module.prepare_micro_batches is not _split:
            yield
            return
        _module.prepare_micro_batches = self._by_prompts
        try:
            yield
        finally:
            _module.prepare_micro_batches = _split

    def _by_prompts(self, data: Any, dp_group: Any = None, **request: Any) -> tuple[list[Any], list[list[int]]]:
        lengths, most = data["input_ids"].offsets().diff().tolist(), data["max_token_len_per_gpu"]
        if max(lengths) > most:
            # verl's assertion names the numbers.
            return _split(data, dp_group=dp_group, **request)
        keys: Any = get_non_tensor_data(data, KEYS_FIELD, default=1)
        parts = by_tokens(lengths, most, largest_of(dp_group), prompts=row_prompts(data), keys=keys)
        return [index_select_tensor_dict(data, part) for part in parts], parts

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return verl's inputs for the computed rows, and their plan."""
        lengths, answers = (micro_batch[name].offsets().diff().tolist() for name in ("input_ids", "responses"))
        groups, device = row_prompts(micro_batch) or [], micro_batch["input_ids"].device
        self._plan = plan = SharedPlan(lengths, answers, groups, device, self._kernel)
        self._compact = compact(micro_batch, plan)
        prompts, whole = sum(map(shared_tokens, lengths, answers)), sum(lengths)
        found = whole, prompts, prompts - (whole - sum(plan.lengths))
        self._tokens = (self._tokens[0] + found[0], self._tokens[1] + found[1], self._tokens[2] + found[2])
        stock: Any = super()
        inputs, arguments = stock.prepare_model_inputs(self._compact)
        return {**inputs, "shared_prompts": plan}, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Return verl's outputs of the computed rows, at each token of the whole ones."""
        if self._plan.used < self._layers:
            raise FuseError(
                f"{SWITCH}=true: {self._plan.used} of the model's {self._layers} layers attend by transformers' "
                "registry, which something replaced (actor_rollout_ref.model.external_lib?); false computes each "
                "sample's prompt"
            )
        stock: Any = super()
        found = stock.prepare_model_outputs(output, output_args, self._compact, logits_processor_func)
        starts = micro_batch["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(values.values()[self._plan.expanded], starts)
            for name, values in found.items()
        }

    def take_tokens(self) -> tuple[int, int, int]:
        """Return the tokens of the rows since the last call, those of prompts, and those of prompts that were
        computed."""
        found, self._tokens = self._tokens, (0, 0, 0)
        return found


def compact(micro_batch: Any, plan: SharedPlan) -> TensorDict:
    """Return the computed rows as verl's engine reads them: packed."""

    def nested(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *lengths], device=values.device).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(values, starts)

    tokens = micro_batch["input_ids"].values()[plan.kept]
    # Nothing but its lengths is read.
    answers = tokens.new_zeros(sum(plan.answers))
    found = TensorDict(
        {
            "input_ids": nested(tokens, plan.lengths),
            "position_ids": nested(micro_batch["position_ids"].values()[plan.kept], plan.lengths),
            "responses": nested(answers, plan.answers),
        },
        batch_size=[len(plan.lengths)],
    )
    for name, value in micro_batch.items():
        if isinstance(value, NonTensorData):
            found[name] = NonTensorData(value.data, batch_size=found.batch_size)
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor) and temperature.dim():
        found["temperature"] = temperature[plan.sources]
    assign_non_tensor(found, use_remove_padding=True)
    return found


def share_prompts(engine: Any, strict: bool) -> None:
    """Let an engine of verl that is built compute each prompt once. One that cannot computes all of them, and a warning
    says so; with `strict` it is refused."""
    if found := " and ".join(_unfit(engine)):
        if strict:
            raise FuseError(f"{SWITCH}=true: not with {found}; false computes each sample's prompt")
        logger.warning("%s=true: without effect with %s: each sample's prompt is computed", SWITCH, found)
        return
    model = _model(engine)
    config = model.config
    kernel, config._attn_implementation = config._attn_implementation, NAME
    engine.__class__ = type(f"SharedPrompts{type(engine).__name__}", (SharedPrompts, type(engine)), {})
    # With activations that are offloaded verl wraps layers itself, and the model says that it recomputes none.
    engine.share(kernel, config.num_hidden_layers, bool(engine.model_config.enable_gradient_checkpointing))


def _model(engine: Any) -> Any:
    """Return the outermost model of transformers, under FSDP and adapters; None where there is none."""
    return next((part for part in engine.module.modules() if isinstance(part, PreTrainedModel)), None)


def _unfit(engine: Any) -> Iterator[str]:
    kinds = [kind for kind in type(engine).__mro__ if "prepare_model_inputs" in vars(kind)]
    # Classes on top of verl's are this project's.
    if next((kind for kind in kinds if kind.__module__.partition(".")[0] == "verl"), None) is not FSDPEngineWithLMHead:
        yield f"the engine {type(engine).__name__}"
        return
    for name in ("use_ulysses_sp", "pad_to_length"):
        if getattr(engine, name, False):
            yield f"{name}=true of its engine"
    if (model := _model(engine)) is None:
        yield "a model that is none of transformers"
        return
    if any(hasattr(part, "v_head") for part in engine.module.modules()):
        yield "a value head of trl"
    config, kernel = model.config, str(model.config._attn_implementation)
    if config.model_type not in MODEL_TYPES or not of_transformers(type(model)):
        yield f"a model of type {config.model_type} ({type(model).__module__}): {', '.join(MODEL_TYPES)} were run"
    if getattr(config, "attention_dropout", 0.0):
        yield f"attention_dropout={config.attention_dropout}"
    if any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in engine.module.modules()):
        yield "dropout, which samples would share"
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        yield "attention that looks ahead"
    if positions := _RELATIVE & _rope_types(config):
        yield f"rope_type={', '.join(positions)}, by the longest row of a micro-batch"
    if getattr(config, "output_router_logits", False):
        yield "output_router_logits=true, a loss over a micro-batch's tokens"
    if get_device_name() != "cpu" and not kernel.startswith(FLASH):
        yield f"attn_implementation={kernel} on {get_device_name()}, where {FLASH}_2 or _3 is needed"
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap and not kernel.startswith(FLASH):
        yield f"attn_logit_softcapping={softcap} and attn_implementation={kernel}: {FLASH}_2 has it"


def _rope_types(config: Any) -> set[str]:
    """Return how a model stretches its positions: all layers alike, or by the type of a layer."""
    whole = getattr(config, "rope_parameters", None) or {}
    blocks = [whole, *(block for block in whole.values() if isinstance(block, dict))]
    return {str(block["rope_type"]) for block in blocks if "rope_type" in block}


def shared_prompts_worker_class(base: type, strict: bool) -> type:
    """Return a subclass of verl's actor worker `base` whose actor and reference compute each prompt once; `strict`: a
    model that cannot is refused."""
    build = base.init_model  # type: ignore[attr-defined]

    @functools.wraps(build)
    def init_model(self: Any) -> None:
        build(self)
        for worker in filter(None, (self.actor, self.ref)):
            share_prompts(worker.engine, strict)

    return _asked(base, init_model, lambda worker: [part.engine for part in (worker.actor, worker.ref) if part])


def shared_prompts_critic_class(base: type) -> type:
    """Return a subclass of verl's critic worker `base` that computes each prompt once, where its model can."""
    build = base.reset  # type: ignore[attr-defined]

    @functools.wraps(build)
    def reset(self: Any) -> None:
        build(self)
        share_prompts(self.engine, strict=False)

    return _asked(base, reset, lambda worker: [worker.engine])


def _asked(base: type, build: Callable[[Any], None], engines: Callable[[Any], list[Any]]) -> type:
    """Return a subclass of a worker with this method that builds its `engines`, which tells what they share."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def shares_prompts(self: Any) -> bool:
        """Tell whether all models of the worker compute each prompt once."""
        return all(isinstance(engine, SharedPrompts) for engine in engines(self))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def take_tokens(self: Any, model: str) -> tuple[int, int, int]:
        """Return the tokens of the rows that `model` ("actor", "ref", "critic") got since the last call, those of
        prompts, and those of prompts that were computed."""
        return getattr(self, model, self).engine.take_tokens()

    members = {
        "__doc__": base.__doc__,
        build.__name__: build,
        "shares_prompts": shares_prompts,
        "take_tokens": take_tokens,
    }
    return type(f"SharedPrompts{base.__name__}", (base,), members)
