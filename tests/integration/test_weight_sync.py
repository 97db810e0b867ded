"""Shards of real FSDP2 modules become the weights of real vLLM models, tensor-parallel ones included: what vLLM has
from the whole parameters.

Shows the invariants in the docstrings of plugins/verl_fuse_realloc/sync.
"""

import multiprocessing.forkserver
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from loading_ranks import CASES, PRELOAD, RANKS, config_of, loaded, refused
from ranks import CONTEXT, Ranks

from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.program import lower_bound, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.model import Model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of the cpu platform, forked from a server that has vLLM loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}.items():
            patch.setenv(name, value)
        # There is one server per process: an earlier module's was started in another environment.
        multiprocessing.forkserver._forkserver._stop()
        CONTEXT.set_forkserver_preload(PRELOAD)
        with Ranks(RANKS) as ranks:
            yield ranks
        multiprocessing.forkserver._forkserver._stop()
        CONTEXT.set_forkserver_preload(["verl_fuse.runtime.executor"])


@pytest.mark.parametrize("name", CASES)
def test_vllm_has_what_it_would_have_from_whole_parameters(ranks: Ranks, name: str, tmp_path: Path):
    case = CASES[name]
    found = ranks.call(loaded, name, tmp_path)
    assert {tuple(rank["different"]) for rank in found} == {()}
    assert all(rank["finite"] and rank["tensors"] > 10 for rank in found)
    assert {rank["versions"] for rank in found} == {(None, 5)}, "a version only when all of it is loaded"
    config = config_of(case)
    weights = parameters_of(Model.from_hf(config.to_dict(), name), config.model_type)
    source = FsdpSharding(case.mesh[-1], RANKS // case.mesh[-1])
    item = 2 if case.dtype == "bfloat16" else 4
    program = plan_transfer(
        weights,
        PlacedSharding.at(source),
        PlacedSharding.at(LoadableSharding(VllmSharding(case.tp, RANKS // case.tp))),
        nodes=[0] * RANKS,
        item_bytes=item,
    )
    assert sum(rank["received"] for rank in found) == lower_bound(program)[0], "nothing is gathered"
    assert all(rank["extra"] <= 1 << 15 for rank in found)


def test_what_is_not_known_is_refused_before_anything_is_sent(ranks: Ranks):
    for said in ranks.call(refused):
        assert said == [
            (
                "model 'gpt2': model_type='gpt2'; parameters are known for llama, mistral, gemma, gemma2, qwen2, "
                "qwen2_moe, qwen3, qwen3_moe, gemma3_text"
            ),
            (
                "weight sync: of the model's parameters ['extra'] are not known (1 in all), and [] are missing (0); "
                "needs those of a plain qwen3"
            ),
            "weight sync: parameter 'model.embed_tokens.weight' is a Tensor; needs FSDP2, whose are DTensors",
            "weight sync: replicas vllm tp1 dp3 have 3 ranks, training has 4; needs as many",
        ]
