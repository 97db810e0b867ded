"""Computes the shapes of messages between pipeline stages in verl's Megatron engine, from sequence lengths alone.

Megatron would exchange shapes before every message, because verl lets them vary; every rank of a pipeline has the
lengths, so it need not. The rules are those of verl.models.mcore.util.preprocess_thd_engine (packed) and
preprocess_bshd_engine (padded).

Invariants (tests/integration/test_megatron_messages.py): shapes equal those of verl's own preprocessing, for every size
of tensor and context parallelism; what is padded by other rules is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_fuse.errors import FuseError
from verl_fuse.runtime.stage import TensorSpec


@dataclass(frozen=True)
class Padding:
    """The layout of an engine's micro-batches: `packed` sequences behind each other, or padded to one length.

    With sequence parallelism a stage hands on `1 / tensor` of the positions. `bucket` rounds up the length of packed
    micro-batches.
    """

    packed: bool
    tensor: int
    context: int
    sequence_parallel: bool
    hidden: int
    dtype: torch.dtype
    bucket: int | None = None

    @classmethod
    def of(cls, engine_config: Any, model_config: Any) -> "Padding":
        """Read the padding from verl's McoreEngineConfig and Megatron's TransformerConfig; FuseError for engines that
        pad by other rules."""
        if engine_config.dynamic_context_parallel:
            raise FuseError("dynamic_context_parallel=True: a fused pipeline does not know its shapes; set it to False")
        if model_config.fp8 is not None:
            raise FuseError(f"fp8={model_config.fp8!r}: a fused pipeline does not know its padding; needs None")
        return cls(
            packed=engine_config.use_remove_padding,
            tensor=engine_config.tensor_model_parallel_size,
            context=engine_config.context_parallel_size,
            sequence_parallel=model_config.sequence_parallel,
            hidden=model_config.hidden_size,
            dtype=model_config.pipeline_dtype,
            bucket=engine_config.pad_to_length_bucket if engine_config.pad_to_length else None,
        )

    def message(self, lengths: Sequence[int], longest: int | None = None) -> TensorSpec:
        """Return the tensors that one stage hands to the next for a micro-batch of sequences with these lengths
        (tokens).

        `longest` is the length that unpacked sequences are padded to, that of the longest here if None (verl:
        `forced_max_seqlen`).
        """
        align = self.tensor * self.context * (2 if self.context > 1 else 1)
        if self.packed:
            total = sum(_round_up(length, align) for length in lengths)
            if self.bucket is not None:
                total = _round_up(total, math.lcm(self.bucket, self.context))
            positions, samples = total, 1
        else:
            positions, samples = _round_up(longest or max(lengths), align), len(lengths)
        positions //= self.context
        if self.sequence_parallel:
            positions //= self.tensor
        return TensorSpec((positions, samples, self.hidden), self.dtype)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
