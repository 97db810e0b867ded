"""Describes a decoder-only transformer by the sizes that decide its cost.

Invariants (tests/unit/spec/test_model.py):
- every size is a positive whole number, `kv_heads` divides `heads`, and a token uses at most as
  many experts as there are;
- `active_parameters <= parameters`, equal for a dense model;
- parameter counts agree with the published ones within 0.1 % (biases and norms inside attention are not counted).
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load

# Architectures whose block is counted rightly: gated MLP, grouped-query attention, every block alike (attention within
# a window counts as global).
TIED_TYPES = ("gemma", "gemma2", "gemma3_text")
DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3", *TIED_TYPES)
MOE_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class Model:
    """A model has sizes in elements. With `experts`, `intermediate` is the width of one expert; `shared_intermediate`
    the width of the expert that is always active."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    value_head: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary"):
            self._needs(name, getattr(self, name) > 0, "a whole number > 0")
        for name in ("experts", "experts_per_token", "shared_intermediate"):
            self._needs(name, getattr(self, name) >= 0, "a whole number >= 0")
        self._needs("kv_heads", self.heads % self.kv_heads == 0, f"a divisor of heads={self.heads}")
        self._needs(
            "experts_per_token",
            self.experts_per_token <= self.experts and (self.experts_per_token > 0) == (self.experts > 0),
            f"1 to experts={self.experts}" if self.experts else "0 without experts",
        )

    def _needs(self, name: str, good: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not good:
            raise FuseError(f"model {self.name!r}: {name}={value!r}; needs {allowed}")

    @property
    def attention_parameters(self) -> int:
        """Return the elements of the query, key, value and output projections of one block."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Return the elements of one expert of a block, or of the whole MLP of a dense block."""
        return 3 * self.hidden * self.intermediate

    @property
    def block_parameters(self) -> int:
        return self._block(max(1, self.experts))

    @property
    def active_block_parameters(self) -> int:
        """Return the parameters that one token is multiplied with in a block."""
        return self._block(max(1, self.experts_per_token))

    def _block(self, experts: int) -> int:
        router_and_shared = self.hidden * self.experts + 3 * self.hidden * self.shared_intermediate
        return self.attention_parameters + experts * self.expert_parameters + router_and_shared + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head_width(self) -> int:
        """Return the outputs per token: the vocabulary, or one value."""
        return 1 if self.value_head else self.vocabulary

    @property
    def head_parameters(self) -> int:
        """Return the number of the head's own weights: none where the head shares the embedding's."""
        return 0 if self.tied_embeddings else self.head_width * self.hidden

    @property
    def parameters(self) -> int:
        return self._around(self.layers * self.block_parameters)

    @property
    def active_parameters(self) -> int:
        """Return the parameters that a token touches."""
        return self._around(self.layers * self.active_block_parameters)

    def _around(self, blocks: int) -> int:
        return blocks + self.embedding_parameters + self.head_parameters + self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Return the elements of the KV cache per token, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def as_value_model(self) -> "Model":
        """Return the same transformer with a head of width one: critic or reward model."""
        return dataclasses.replace(self, tied_embeddings=False, value_head=True)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> "Model":
        """Build from the contents of a Hugging Face `config.json`; refuse architectures whose blocks
        would be counted wrongly."""
        name = name or str(config.get("_name_or_path") or config.get("model_type"))
        kind = config.get("model_type")
        if kind not in (*DENSE_TYPES, *MOE_TYPES):
            raise FuseError(
                f"model {name!r}: model_type={kind!r}; known: {', '.join(DENSE_TYPES)}, {', '.join(MOE_TYPES)}"
            )
        moe = kind in MOE_TYPES
        if moe and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise FuseError(f"model {name!r}: mixes dense and MoE blocks; only models whose blocks are alike are known")
        heads = _size(config, "num_attention_heads", name)
        if heads < 1:
            raise FuseError(f"model {name!r}: num_attention_heads={heads}; needs a whole number > 0")
        hidden = _size(config, "hidden_size", name)
        return cls(
            name=name,
            layers=_size(config, "num_hidden_layers", name),
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", name, heads),
            head_dim=_size(config, "head_dim", name, hidden // heads),
            intermediate=_size(
                config, "moe_intermediate_size" if moe and kind != "mixtral" else "intermediate_size", name
            ),
            vocabulary=_size(config, "vocab_size", name),
            # A checkpoint may leave out the defaults of its class.
            tied_embeddings=bool(config.get("tie_word_embeddings", kind in TIED_TYPES)),
            experts=_size(config, _experts_key(config), name) if moe else 0,
            experts_per_token=_size(config, "num_experts_per_tok", name) if moe else 0,
            shared_intermediate=_size(config, "shared_expert_intermediate_size", name, 0) if moe else 0,
        )

    @classmethod
    def read(cls, path: Path) -> "Model":
        """Read a `config.json`, or a folder that holds one; every error names the file."""
        path = path / "config.json" if path.is_dir() else path
        return load(path, lambda text: cls._parse(text, path.parent.name))

    @classmethod
    def _parse(cls, text: str, name: str) -> "Model":
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise FuseError(f"not JSON: {error}") from error
        if not isinstance(config, dict):
            raise FuseError("not a Hugging Face model configuration")
        return cls.from_hf(config, name)


def _experts_key(config: Mapping[str, Any]) -> str:
    """Return the key of the number of experts; transformers 5 uses Mixtral's name for other families as well."""
    return "num_experts" if config.get("num_experts") is not None else "num_local_experts"


def _size(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise FuseError(f"model {name!r}: {key}={value!r}; needs a whole number")
    return value
