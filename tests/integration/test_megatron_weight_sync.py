"""Shards of verl's own Megatron engines become the weights of real vLLM models: what vLLM has
from the whole checkpoint.

Shows the invariants in the docstring of plugins/verl_fuse_realloc/sync/megatron.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from loading_ranks import PRELOAD, RANKS
from megatron_syncs import SYNCS, loaded, refused, write
from small_engines import Ranks, cpu_server

from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.program import lower_bound, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.text import sharding_from
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.model import Model

# How the engines of the cases are laid out.
LAYOUTS = {
    "llama, tp2 pp2, vllm tp 1": "megatron tp2 pp2 stages=1+1 vocabulary=64 local",
    "qwen2, pp2 dp2, vllm tp 2": "megatron pp2 dp2 stages=1+1 vocabulary=200 local",
    "qwen3, tp2 dp2, vllm tp 2": "megatron tp2 dp2 stages=2 vocabulary=128 local",
}
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with cpu_server(*PRELOAD):
        yield


@pytest.mark.parametrize("name", SYNCS)
def test_vllm_has_what_it_would_have_from_the_whole_checkpoint(name: str, tmp_path: Path):
    write(tmp_path, SYNCS[name])
    sync = SYNCS[name]
    with Ranks(RANKS) as ranks:
        found = ranks.call(loaded, name, tmp_path)
    assert {tuple(rank["different"]) for rank in found} == {()}
    assert all(rank["finite"] and rank["tensors"] > 10 for rank in found)
    assert {rank["versions"] for rank in found} == {(None, 5)}, "a version only when all of it is loaded"
    source = PlacedSharding.at(sharding_from(LAYOUTS[name]))
    target = PlacedSharding.at(LoadableSharding(VllmSharding(sync.tp, RANKS // sync.tp)))
    options = sync.options
    sizes = (options["num_key_value_heads"], 8, 64, options["vocab_size"], options["tie_word_embeddings"])
    weights = parameters_of(Model("m", 2, 32, 4, *sizes), sync.family.lower())
    program = plan_transfer(weights, source, target, nodes=[0] * RANKS, item_bytes=2)
    assert sum(rank["received"] for rank in found) == lower_bound(program)[0], "nothing is gathered"


def test_what_is_not_known_is_refused_before_anything_is_sent(tmp_path: Path):
    write(tmp_path, SYNCS["llama, tp2 pp2, vllm tp 1"])
    layout = LAYOUTS["llama, tp2 pp2, vllm tp 1"]
    with Ranks(RANKS) as ranks:
        found = ranks.call(refused, tmp_path)
    for rank, said in enumerate(found):
        assert said == [
            "weight sync: virtual_pipeline_model_parallel_size=2; needs 1",
            "weight sync: fp8='hybrid'; needs None",
            "weight sync: pipeline_model_parallel_layout='Et|tL'; needs None",
            "weight sync: context_parallel_size=2; needs 1",
            (
                f"weight sync: rank {rank} has 'decoder.layers.0.input_layernorm.weight' of shape (31,); "
                f"needs (32,), as a plain llama in {layout}"
            ),
            f"weight sync: rank {rank} has 'extra' of shape (1,); needs None, as a plain llama in {layout}",
        ]
