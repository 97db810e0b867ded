"""Message shapes against verl's own preprocessing, on four gloo processes. Shows the invariants of
plugins/verl_fuse_pipeline/megatron/messages.py."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runtime"))
from ranks import CONTEXT, Ranks, World

from verl_fuse.errors import FuseError

pytestmark = pytest.mark.integration
CONTEXT.set_forkserver_preload(["verl_fuse.runtime.executor", "megatron.core.models.gpt"])

SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def compared(world: World) -> list[str]:
    """Where our shapes differ from those verl's preprocessing makes, over sizes and random lengths."""
    from megatron.core import parallel_state
    from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

    from verl_fuse_pipeline.megatron.messages import Padding
    from verl_fuse_pipeline.megatron.view import View

    draw, different = random.Random(0), []
    for tensor, context in SIZES:
        view = View(f"tp{tensor} cp{context}")
        with view.active():
            parallel_state.initialize_model_parallel(tensor, 1, context_parallel_size=context)
            for _ in range(10):
                lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
                ids = torch.nested.as_nested_tensor(
                    [torch.ones(n, dtype=torch.long) for n in lengths], layout=torch.jagged
                )
                longest = draw.choice([None, max(lengths), max(lengths) + 7])
                bucket = draw.choice([None, 16, 24])
                padding = Padding(False, tensor, context, False, 8, torch.float32)
                padded = preprocess_bshd_engine(ids, forced_max_seqlen=longest)[0]
                packed = preprocess_thd_engine(ids, pad_to_length_bucket=bucket)[0]
                found = padding.message(lengths, longest), replace(padding, packed=True, bucket=bucket).message(lengths)
                wanted = (padded.shape[1], padded.shape[0], 8), (packed.shape[1], packed.shape[0], 8)
                if (found[0].shape, found[1].shape) != wanted:
                    different.append(
                        f"tp={tensor} cp={context} {lengths} {longest} {bucket}: {found}, verl has {wanted}"
                    )
    return different


def test_shapes_are_those_of_verls_preprocessing(ranks: Ranks):
    assert ranks.call(compared) == [[]] * 4


def test_sequence_parallel_stages_hand_on_their_share():
    from verl_fuse_pipeline.megatron.messages import Padding

    padding = Padding(True, 2, 1, True, 8, torch.bfloat16)
    assert padding.message([5, 3]) == ((5, 1, 8), torch.bfloat16)
    assert replace(padding, packed=False).message([5, 3]) == ((3, 2, 8), torch.bfloat16)


def from_configs(world: World) -> list[str]:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.workers.config import McoreEngineConfig

    from verl_fuse_pipeline.megatron.messages import Padding

    def model(**options: object) -> TransformerConfig:
        return TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.bfloat16, **options
        )

    engine = McoreEngineConfig(
        tensor_model_parallel_size=2, use_remove_padding=True, pad_to_length=True, pad_to_length_bucket=16
    )
    padding = Padding.of(engine, model(tensor_model_parallel_size=2, sequence_parallel=True))
    found = [str(padding.message([5, 3]).shape)]
    with_fp8 = model()
    with_fp8.fp8 = "hybrid"
    for engine_config, model_config in (
        (
            McoreEngineConfig(dynamic_context_parallel=True, use_remove_padding=True, max_seqlen_per_dp_cp_rank=64),
            model(),
        ),
        (engine, with_fp8),
    ):
        with pytest.raises(FuseError) as caught:
            Padding.of(engine_config, model_config)
        found.append(str(caught.value))
    return found


def test_padding_comes_from_verls_and_megatrons_configs(ranks: Ranks):
    assert ranks.call(from_configs)[0] == [
        "(8, 1, 8)",
        "dynamic_context_parallel=True: a fused pipeline does not know its shapes; set it to False",
        "fp8='hybrid': a fused pipeline does not know its padding; needs None",
    ]
