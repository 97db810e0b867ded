"""Experts that Megatron shares out over ranks become the weights of vLLM's own Qwen3-MoE, and of copies that have all.

Shows the invariants in the docstrings of plugins/verl_fuse_realloc/sync/megatron.py and
verl_fuse/host/weights/whole_megatron.py for expert parallelism.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from loading_ranks import PRELOAD, RANKS
from megatron_experts import loaded, taken, write
from small_engines import Ranks, cpu_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder; meanwhile ranks have the cpu platform."""
    made = tmp_path_factory.mktemp("experts")
    with cpu_server(*PRELOAD):
        write(made)
        yield made


def test_vllm_has_the_experts_it_would_have_from_the_whole_checkpoint(folder: Path):
    with Ranks(RANKS) as ranks:
        found = ranks.call(loaded, folder, 2)
    assert {tuple(rank["different"]) for rank in found} == {()}
    assert all(rank["finite"] and rank["tensors"] > 10 for rank in found)
    assert {rank["versions"] for rank in found} == {(None, 5)}
    assert all(rank["received"] > 0 for rank in found), "a rank has half of the experts"


def test_copies_have_all_experts_however_they_are_cut(folder: Path):
    with Ranks(RANKS) as ranks:
        found = ranks.call(taken, folder)
    for rank in found:
        left, whole, biases = rank.pop("left")
        assert left == whole, "each element once"
        assert biases == 4 * 2, "of four experts in two layers"
        assert {layout: different for layout, (different, *_) in rank.items()} == {layout: [] for layout in rank}
        assert all(parts > 10 and biased for _, parts, biased in rank.values())
