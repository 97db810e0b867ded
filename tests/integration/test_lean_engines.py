"""A lean update is verl's: losses, gradient norms, parameters and Adam's moments after three steps, with real workers of two ranks.

What is compared with: two of verl's own splits of the same batch into micro-batches. Shows the invariants in the docstrings of
verl_fuse/host/update/lean.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import Arm, compared, write_model
from small_engines import Ranks, cpu_server

from verl_fuse_update.losses import ROW_LOSSES

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

SKIP = {"skip_zero_gradient": True}
OWN = {"skip_old_log_prob": True}
# Equal rewards in half of the groups; on one rank only; everywhere; in no group.
ZEROS = ("some", "rank 1", "all")
ENGINES = ("fsdp2", "megatron pp1", "megatron pp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_model(folder)
        yield folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ranks(folder: Path, engine: str) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


def differences(ranks: Ranks, folder: Path, engine: str, stock: Arm, zeros=ZEROS, **arms: Arm) -> list[dict]:
    """Of each rank: how arms differ from stock verl."""
    pairs = [("stock", name) for name in arms]
    return ranks.call(compared, folder, engine, {"stock": stock, **arms}, zeros, pairs)


def same(found: dict, name: str, gap: dict) -> None:
    """`name` differs from stock verl by no more than stock verl does from itself with other micro-batches."""
    for what, most in (
        ("parameters", 2e-7),
        ("exp_avg", 1e-6),
        ("exp_avg_sq", 1.5e-6),
        ("loss", 1e-7),
        ("grad_norm", 3e-7),
    ):
        assert found[f"stock - {name}"][what] <= max(most, 2 * gap[what]), (name, what, found)


@pytest.mark.parametrize("loss", sorted(ROW_LOSSES))
def test_samples_without_a_gradient_are_left_out_exactly(ranks: Ranks, folder: Path, engine: str, loss: str):
    stock = Arm(loss=loss, own=True)
    for found in differences(
        ranks,
        folder,
        engine,
        stock,
        other=replace(stock, micro_batch=4),
        lean=replace(stock, lean=SKIP),
        computed=replace(stock, lean=SKIP | {"metrics": "computed"}),
        both=replace(stock, lean=SKIP | OWN),
    ):
        gap = found["stock - other"]
        assert 0 < gap["parameters"] < 1e-6, "two of verl's own splits differ, by rounding"
        for name in ("lean", "computed", "both"):
            same(found, name, gap)
        for name in ("lean", "both"):
            assert found[f"stock - {name}"]["metrics"] < 1e-6, "metrics are stock's"
