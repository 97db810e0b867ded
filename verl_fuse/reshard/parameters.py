"""Lists the parameters of a model under the names of a Hugging Face checkpoint, and how tensor parallelism treats each.

Invariants (tests/unit/reshard/test_parameters.py):
- names and shapes are the same as in the model classes of `transformers` (experts one by one, like in a checkpoint);
- a parameter is a matrix of rows and columns; a vector has one column.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from verl_fuse.errors import FuseError
from verl_fuse.spec.model import Model

# The kinds of splits of a parameter: by rows of the vocabulary, by attention heads, by rows, by columns, or not at all.
ParameterKind = Literal["embedding", "head", "query", "key", "value", "column", "row", "whole"]

# Model types whose parameters are known here, with their biases and norms inside attention.
QKV_BIAS = ("qwen2", "qwen2_moe")
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
# Models with a norm behind attention and MLP as well as before.
FOUR_NORMS = ("gemma2", "gemma3_text")
TYPES = ("llama", "mistral", "gemma", "gemma2", *QKV_BIAS, *QK_NORM)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter; `layer` is its block, `expert` its expert; None for a parameter outside of blocks or experts."""

    name: str
    rows: int
    columns: int
    kind: ParameterKind
    layer: int | None = None
    expert: int | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelParameters:
    """A model with the list of its parameters, in the order of a forward pass."""

    model: Model
    parameters: tuple[Parameter, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the place of each parameter by name."""
        return {parameter.name: place for place, parameter in enumerate(self.parameters)}

    @property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)


def require_known(config: Mapping[str, Any], name: str) -> None:
    """Raise a FuseError unless the parameters of a model with this `config.json` are known here."""
    kind = config.get("model_type")
    if kind not in TYPES:
        raise FuseError(f"model {name!r}: model_type={kind!r}; parameters are known for {', '.join(TYPES)}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise FuseError(f"model {name!r}: {key}={config[key]!r}; parameters of {kind} are known without")
    Model.from_hf(config, name)


def parameters_of(model: Model, model_type: str, *, head_bias: bool = False) -> ModelParameters:
    """Return the parameters of a model; `model_type` is that of its `config.json`. A value model has the head `score`;
    `head_bias` tells whether the head has a bias."""
    if model_type not in TYPES:
        raise FuseError(f"model {model.name!r}: model_type={model_type!r}; parameters are known for {', '.join(TYPES)}")
    if bool(model.experts) != model_type.endswith("_moe"):
        raise FuseError(f"model {model.name!r}: model_type={model_type!r} with experts={model.experts}")
    parameters = [Parameter("model.embed_tokens.weight", model.vocabulary, model.hidden, "embedding")]
    for layer in range(model.layers):
        parameters += _block(model, model_type, layer)
    parameters.append(Parameter("model.norm.weight", model.hidden, 1, "whole"))
    if model.value_head:
        parameters.append(Parameter("score.weight", 1, model.hidden, "whole"))
        if head_bias:
            parameters.append(Parameter("score.bias", 1, 1, "whole"))
    elif not model.tied_embeddings:
        parameters.append(Parameter("lm_head.weight", model.vocabulary, model.hidden, "head"))
    return ModelParameters(model, tuple(parameters))


def _block(model: Model, model_type: str, layer: int) -> Iterator[Parameter]:
    prefix, hidden = f"model.layers.{layer}.", model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def parameter(name: str, rows: int, columns: int, kind: ParameterKind, expert: int | None = None) -> Parameter:
        return Parameter(prefix + name, rows, columns, kind, layer, expert)

    yield parameter("input_layernorm.weight", hidden, 1, "whole")
    attention: tuple[tuple[str, int, ParameterKind], ...] = (
        ("q", queries, "query"),
        ("k", keys, "key"),
        ("v", keys, "value"),
    )
    for letter, rows, kind in attention:
        yield parameter(f"self_attn.{letter}_proj.weight", rows, hidden, kind)
        if model_type in QKV_BIAS:
            yield parameter(f"self_attn.{letter}_proj.bias", rows, 1, kind)
    if model_type in QK_NORM:
        yield parameter("self_attn.q_norm.weight", model.head_dim, 1, "whole")
        yield parameter("self_attn.k_norm.weight", model.head_dim, 1, "whole")
    yield parameter("self_attn.o_proj.weight", hidden, queries, "row")
    yield parameter("post_attention_layernorm.weight", hidden, 1, "whole")
    if model_type in FOUR_NORMS:
        yield parameter("pre_feedforward_layernorm.weight", hidden, 1, "whole")
        yield parameter("post_feedforward_layernorm.weight", hidden, 1, "whole")
    if not model.experts:
        yield from _mlp(prefix + "mlp.", model.intermediate, hidden, layer, None)
        return
    yield parameter("mlp.gate.weight", model.experts, hidden, "whole")
    for expert in range(model.experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", model.intermediate, hidden, layer, expert)
    if model.shared_intermediate:
        yield from _mlp(prefix + "mlp.shared_expert.", model.shared_intermediate, hidden, layer, None)
        yield parameter("mlp.shared_expert_gate.weight", 1, hidden, "whole")


def _mlp(prefix: str, width: int, hidden: int, layer: int, expert: int | None) -> Iterator[Parameter]:
    yield Parameter(prefix + "gate_proj.weight", width, hidden, "column", layer, expert)
    yield Parameter(prefix + "up_proj.weight", width, hidden, "column", layer, expert)
    yield Parameter(prefix + "down_proj.weight", hidden, width, "row", layer, expert)
