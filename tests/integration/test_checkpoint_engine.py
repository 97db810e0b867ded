"""verl's checkpoint engine `fuse` between shards of FSDP2 and Megatron and the workers of standalone replicas.

Shows the invariants in the docstring of plugins/verl_fuse_realloc/sync/checkpoint_engine.py. What vLLM loads of such
tensors: test_weight_sync.py.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from separate_ranks import CONFIG, RANKS, TRAINERS, fsdp_engine, synced
from small_engines import Ranks, cpu_server

from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.model import Model

pytest.importorskip("verl")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with cpu_server():
        yield


@pytest.mark.parametrize("tp", [1, 2])
def test_workers_are_given_what_they_load(tp: int):
    loads(tp, fsdp_engine)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_workers_are_given_what_they_load_by_a_megatron_engine(name: str, tmp_path: Path):
    pytest.importorskip("megatron.core")
    from megatron_syncs import SEPARATE, separate_engine, write

    write(tmp_path, SEPARATE[name])
    loads(SEPARATE[name].tp, partial(separate_engine, name=name, folder=tmp_path))


def loads(tp: int, make: Callable[..., Any]) -> None:
    """Check that workers of replicas of `tp` are given what they load, by engines that `make` makes."""
    import torch

    model = Model("m", 2, 32, 4, 2, 8, 64, CONFIG["vocab_size"])
    weights = parameters_of(model, "qwen2")
    loadable = LoadableSharding(VllmSharding(tp, (RANKS - TRAINERS) // tp))
    with Ranks(RANKS) as ranks:
        found = ranks.call(synced, tp, make)
    for worker, rank in enumerate(found[TRAINERS:]):
        assert "error" not in rank, rank["error"]
        tensors = loadable.tensors(weights, worker)
        assert [tensor.name for tensor in tensors] == list(rank["given"]), "all parameters, in the order of the model"
        for tensor in tensors:
            given, whole = rank["given"][tensor.name], rank["whole"][tensor.name].to(torch.bfloat16)
            loaded = torch.zeros(given.numel(), dtype=torch.bool)
            for piece in tensor.pieces:
                for row in range(piece.rows):
                    loaded[piece.offset + row * piece.stride : piece.offset + row * piece.stride + piece.columns] = True
            assert torch.equal(given.flatten()[loaded], whole.flatten()[loaded]), tensor.name
            assert given.flatten()[~loaded].isnan().all(), tensor.name
            assert loaded.all() or tp == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "rank 3"),
        ("leaves", "rank 3 stopped loading at 'model.embed_tokens.weight'"),
        ("other version", "ranks have different versions: 4 on ranks [0, 1, 2] against 5 on ranks [3]"),
        ("never joins", "rank 3"),
    ],
)
def test_a_fault_ends_the_sync_everywhere_with_the_worker_named(fault: str, said: str):
    with Ranks(RANKS) as ranks:
        ranks.start(synced, 1, fsdp_engine, fault)
        outcomes = ranks.outcomes(120.0)
    assert outcomes[3].exit_code == 1 if fault == "dies" else outcomes[3].value is not None
    for outcome in outcomes[:3]:
        assert outcome.value is not None, outcome.stack
        assert said in outcome.value["error"]
        assert "of the 4 ranks 0 to 1 train, 2 to 3 are rollout workers" in outcome.value["error"]
