"""Describes the layout of Megatron: tensor, context, data and pipeline parallelism, with experts shared out within
data- and context-parallel ranks.

Query, key and value are fused by groups, gate and up of an MLP one after the other, the vocabulary may be padded, a
tied head has a copy on the last stage. Sources: megatron-core 0.16 (`parallel_state`, `GPTModel`), mbridge 0.15 (names,
order of fused weights).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from verl_fuse.errors import FuseError
from verl_fuse.reshard.local import (
    Entry,
    collected,
    column_block,
    head_rows,
    row_block,
    shape_of,
    tensor_parallel_cells,
)
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import Cells, LocalTensor, Owners
from verl_fuse.spec.layout import Layout, stage_layers

# Names of a block's tensors; the names of a norm depend on the implementation (Transformer Engine fuses it into
# the projection after it).
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
}
_WHOLE = {"mlp.gate.weight": "mlp.router.weight", "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight"}
_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "score.weight": "output_layer.weight",
    "score.bias": "output_layer.bias",
}


@dataclass(frozen=True)
class MegatronSharding:
    """`stages`: blocks per pipeline stage (empty: as even as possible); `vocabulary`: rows of the padded
    embedding (0: not padded); `transformer_engine`: whether norms are fused and experts grouped, as in
    that implementation's names."""

    layout: Layout
    stages: tuple[int, ...] = ()
    vocabulary: int = 0
    transformer_engine: bool = True

    @property
    def devices(self) -> int:
        return self.layout.devices

    def check(self, weights: ModelParameters) -> None:
        model, layout = weights.model, self.layout
        layout.check(model)
        if layout.dp * layout.cp % layout.ep or layout.expert_tp != layout.tp:
            raise FuseError(
                f"layout {self} for {model.name}: ep={layout.ep}; needs a divisor of dp*cp={layout.dp * layout.cp} and "
                f"etp=tp={layout.tp}: weights are not moved where experts fold tensor ranks in"
            )
        vocabulary = self._vocabulary(weights)
        if vocabulary < model.vocabulary or vocabulary % layout.tp:
            raise FuseError(
                f"layout {self} for {model.name}: vocabulary={vocabulary}; needs a multiple of tp={layout.tp} from "
                f"{model.vocabulary} on"
            )
        for size, what in ((model.shared_intermediate, "shared_intermediate"), (self._fused(weights), "fused heads")):
            if size % layout.tp:
                raise FuseError(
                    f"layout {self} for {model.name}: tp={layout.tp}; needs a divisor of the {what}, {size} rows"
                )
        unknown = next((p.name for p in weights.parameters if "_feedforward_layernorm" in p.name), None)
        if unknown is not None:
            raise FuseError(
                f"layout {self} for {model.name}: {unknown!r} has no name known in Megatron; needs another layout"
            )
        if self.stages and (len(self.stages) != layout.pp or sum(self.stages) != model.layers or min(self.stages) < 0):
            raise FuseError(
                f"layout {self} for {model.name}: stages={self.stages}; needs {layout.pp} numbers that add up to "
                f"{model.layers} blocks"
            )

    def cells(self, weights: ModelParameters, parameter: Parameter) -> Cells:
        vocabulary = self._vocabulary(weights)
        homes = self._homes(weights, parameter)
        ep = -1 if parameter.expert is None else parameter.expert // (weights.model.experts // self.layout.ep)
        heads = (
            head_rows(weights.model, self.layout.tp, "grouped") if parameter.kind in ("query", "key", "value") else ()
        )
        rows = vocabulary if parameter.kind in ("embedding", "head") else parameter.rows
        return _cells(self.layout, homes, ep, Parameter("", rows, parameter.columns, parameter.kind), heads)

    def tensors(self, weights: ModelParameters, rank: int) -> tuple[LocalTensor, ...]:
        layout = self.layout
        place, stage = rank % (layout.tp * layout.dp * layout.cp), rank // (layout.tp * layout.dp * layout.cp)
        tp, ep = place % layout.tp, place // layout.tp % layout.ep
        return collected(
            entry
            for parameter in weights.parameters
            if stage in self._homes(weights, parameter)
            for entry in self._entries(weights, parameter, tp, ep, stage)
        )

    def _entries(self, weights: ModelParameters, parameter: Parameter, tp: int, ep: int, stage: int) -> Iterator[Entry]:
        degree, columns = self.layout.tp, parameter.columns
        name = self._name(weights, parameter, stage)
        if parameter.expert is not None and parameter.expert // (weights.model.experts // self.layout.ep) != ep:
            return
        if parameter.kind in ("embedding", "head"):
            share = self._vocabulary(weights) // degree
            yield name, (share, columns), row_block(parameter, tp * share, share)
        elif parameter.kind in ("query", "key", "value"):
            shape = shape_of(parameter, self._fused(weights) // degree, columns)
            for part in head_rows(weights.model, degree, "grouped"):
                if part.kind == parameter.kind and part.rank == tp:
                    yield name, shape, row_block(parameter, part.row, part.rows, part.local)
        elif parameter.kind == "column":
            share = parameter.rows // degree
            before = share if parameter.name.endswith(".up_proj.weight") else 0
            yield name, (2 * share, columns), row_block(parameter, tp * share, share, before)
        elif parameter.kind == "row":
            share = columns // degree
            yield name, (parameter.rows, share), column_block(parameter, tp * share, share)
        else:
            yield name, shape_of(parameter, parameter.rows, columns), row_block(parameter, 0, parameter.rows)

    def _name(self, weights: ModelParameters, parameter: Parameter, stage: int) -> str:
        if parameter.layer is None:
            tied_copy = parameter.kind == "embedding" and stage > 0
            return "output_layer.weight" if tied_copy else _OUTSIDE[parameter.name]
        name = parameter.name.removeprefix(f"model.layers.{parameter.layer}.")
        moe = weights.model.experts > 0
        local = f"decoder.layers.{parameter.layer - sum(self._blocks(weights)[:stage])}."
        if parameter.kind in ("query", "key", "value"):
            return f"{local}self_attention.linear_qkv.{name.rpartition('.')[2]}"
        if name == "self_attn.o_proj.weight":
            return f"{local}self_attention.linear_proj.weight"
        if parameter.kind in ("column", "row"):
            linear = "linear_fc2" if parameter.kind == "row" else "linear_fc1"
            if parameter.expert is None:
                return f"{local}mlp.{'shared_experts.' if moe else ''}{linear}.weight"
            expert = parameter.expert % (weights.model.experts // self.layout.ep)
            if self.transformer_engine:
                return f"{local}mlp.experts.{linear}.weight{expert}"
            return f"{local}mlp.experts.local_experts.{expert}.{linear}.weight"
        fused = self.transformer_engine and not (moe and name == "post_attention_layernorm.weight")
        return local + {**_NORMS, **_WHOLE, **(_FUSED_NORMS if fused else {})}[name]

    def _homes(self, weights: ModelParameters, parameter: Parameter) -> tuple[int, ...]:
        """Return the stages that hold a parameter."""
        last = self.layout.pp - 1
        if parameter.layer is None:
            if parameter.kind != "embedding":
                return (last,)
            return (0, last) if weights.model.tied_embeddings and last else (0,)
        return (_stage_of(self._blocks(weights), parameter.layer),)

    def _blocks(self, weights: ModelParameters) -> tuple[int, ...]:
        return self.stages or stage_layers(weights.model.layers, self.layout.pp)

    def _vocabulary(self, weights: ModelParameters) -> int:
        return self.vocabulary or weights.model.vocabulary

    def _fused(self, weights: ModelParameters) -> int:
        """Return the rows of the fused projection of all ranks."""
        model = weights.model
        return (model.heads + 2 * model.kv_heads) * model.head_dim

    def __str__(self) -> str:
        parts = [f"megatron {self.layout}"]
        if self.stages:
            parts.append("stages=" + "+".join(map(str, self.stages)))
        if self.vocabulary:
            parts.append(f"vocabulary={self.vocabulary}")
        return " ".join(parts) + ("" if self.transformer_engine else " local")


@lru_cache(maxsize=4096)
def _stage_of(blocks: tuple[int, ...], layer: int) -> int:
    return next(stage for stage in range(len(blocks)) if layer < sum(blocks[: stage + 1]))


@lru_cache(maxsize=65536)
def _cells(layout: Layout, homes: tuple[int, ...], ep: int, parameter: Parameter, heads: tuple) -> Cells:
    """Return the cells of a parameter; `ep`: the expert rank that holds it, -1 for all."""
    copies = layout.dp * layout.cp

    def owners(tensor_ranks: tuple[int, ...]) -> Owners:
        return tuple(
            tp + layout.tp * (copy + copies * stage)
            for stage in homes
            for copy in range(copies)
            if ep in (-1, copy % layout.ep)
            for tp in tensor_ranks
        )

    return tensor_parallel_cells(parameter, parameter.rows, layout.tp, heads, owners)
