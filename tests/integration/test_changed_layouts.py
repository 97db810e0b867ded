"""FSDP2 engines of verl change their layout between steps: what they hold is bitwise what it was, and they are
built as verl builds them.

Real TrainingWorkers with verl's PPO losses, clipping, Adam and a falling learning rate, on four gloo processes. Shows
the invariants in the docstrings of verl_fuse/host/layouts.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from sharded_engines import MODELS, RANKS, moved_about, refused, switched, write_models
from small_engines import Ranks, cpu_server

pytest.importorskip("verl")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The models' folder; meanwhile ranks have the cpu platform."""
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_models(folder)
        yield folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(RANKS, folder) as ranks:
        yield ranks


def rows_of(rows: int, shards: int, rank: int) -> range:
    """Rows of a parameter that a rank holds: torch.chunk of them all, repeated where there are more ranks."""
    share = -(-rows // shards)
    return range(min(rank % shards * share, rows), min((rank % shards + 1) * share, rows))


def needed(shapes: list[tuple[int, int]], rank: int, before: int, after: int) -> int:
    """Bytes of parameters in float32 that a rank has in `after` shards and has not in `before`."""
    return 4 * sum(
        columns * len(set(rows_of(rows, after, rank)) - set(rows_of(rows, before, rank))) for rows, columns in shapes
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_what_it_was_and_the_engine_is_as_verl_builds_it(ranks: Ranks, folder: Path, name: str):
    for rank, found in enumerate(ranks.call(moved_about, folder, name)):
        shapes = found["shapes"]
        assert found["untrained"] == needed(shapes, rank, 4, 2), "no moments yet"
        assert found["tensors"] == 4 * len(shapes), "parameters, two moments and a count of steps"
        # The parameter and two moments of it: what is needed and not held.
        layouts = [(4, 2), (2, 1), (1, 2), (2, 4)]
        assert found["changes"] == [(3 * needed(shapes, rank, *change), True, []) for change in layouts]
        assert found["again"] == 0
        assert found["identity"], "back in the first layout, every rank has what it had"
        assert found["kept"]


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_as_if_nothing_had_changed(ranks: Ranks, folder: Path, name: str):
    """Until the change bitwise; after it sums over ranks and shards are taken in another order."""
    for found in ranks.call(switched, folder, name):
        assert found["before"]
        for stock, ours in zip(*found["numbers"], strict=True):
            assert ours.keys() == stock.keys()
            assert "grad_norm" in stock
            for key, value in stock.items():
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        # Two steps of Adam move a parameter by up to 0.02.
        assert found["difference"] < 1e-5
        assert found["random"]
        assert found["resumed"] == (True, True, 2), "a worker built in four shards goes on from the checkpoint in two"


def test_what_cannot_be_changed_is_refused_and_faults_name_the_rank(ranks: Ranks, folder: Path):
    for rank, said in enumerate(ranks.call(refused, folder)):
        unknown, changed, refusal, usable, version, failure = said
        assert "in a way that is not known here; needs torch 2.11 or 2.13" in unknown
        assert changed == "True", "found before anything is taken"
        assert "the optimizer's 'row' of 'model.embed_tokens.weight' is a Tensor of shape (3,)" in refusal
        assert usable == "True", "a refusal leaves the engine as it was"
        assert "ranks have different versions: 0 on ranks [0, 1, 2] against 1 on ranks [3]" in version
        if rank == 1:
            assert failure.startswith("AttributeError")
        else:
            assert "layout change stopped: rank 1 failed: AttributeError" in failure
