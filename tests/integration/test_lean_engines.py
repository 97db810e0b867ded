"""A lean update is verl's: losses, gradient norms, parameters and Adam's moments after three steps, with real workers of two ranks.

What is compared with: two of verl's own splits of the same batch into micro-batches. Shows the invariants in the docstrings of
verl_fuse/host/update/lean.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, Arm, compared, write_model
from small_engines import Ranks, cpu_server

from verl_fuse_update.losses import ROW_LOSSES

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

SKIP = {"skip_zero_gradient": True}
OWN = {"skip_old_log_prob": True}
COMPUTED = {"metrics": "computed"}
# Equal rewards in half of the groups; on one rank only; everywhere.
ZEROS = ("some", "rank 1", "all")
LONG = pytest.mark.skipif(not os.environ.get("VERL_FUSE_LONG"), reason="VERL_FUSE_LONG is not set")
ENGINES = ("fsdp2", "megatron pp1", pytest.param("megatron pp2", marks=LONG))
# Every loss on FSDP2, where all is float32; on Megatron, whose parameters are bfloat16, those that differ most.
SHORT = {"fsdp2": sorted(ROW_LOSSES), "megatron pp1": ["gspo", "vanilla"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder; meanwhile ranks have the cpu platform."""
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


def differences(ranks: Ranks, folder: Path, engine: str, stock: Arm, zeros: Sequence[str] = ZEROS, **arms: Arm) -> list:
    """Of each rank: how arms differ from stock verl, by arm."""
    pairs = [("stock", name) for name in arms]
    found = ranks.call(compared, folder, engine, {"stock": stock, **arms}, zeros, pairs)
    return [{name: one[f"stock - {name}"] for name in arms} for one in found]


# What may differ whatever verl's two splits do, whose losses and norms, one number each, may be close by chance: rounding of float32, and of
# bfloat16, in which Megatron's parameters are.
FLOORS = {"loss": 1e-3, "grad_norm": 5e-3}


def assert_same(found: dict[str, dict[str, float]], *names: str, times: float = 3.0) -> None:
    """These arms differ from stock verl about as much as stock verl does from itself with other micro-batches (`other`), at most `times` as much."""
    gap = found["other"]
    assert 0 < gap["parameters"] < 0.05, "two of verl's own splits differ, by rounding"
    floors = FLOORS if gap["parameters"] > 1e-4 else {}
    for name in names:
        for what in gap.keys() - {"metrics", "bitwise"}:
            assert found[name][what] <= times * gap[what] + floors.get(what, 1e-7), (name, what, found)


def test_samples_without_a_gradient_are_left_out(ranks: Ranks, folder: Path, engine: str):
    for loss in sorted(ROW_LOSSES) if os.environ.get("VERL_FUSE_LONG") else SHORT[engine]:
        stock = Arm(loss=loss, own=True)
        other, both = replace(stock, micro_batch=4), replace(stock, lean=SKIP | OWN)
        for found in differences(ranks, folder, engine, stock, other=other, both=both):
            assert_same(found, "both")
            assert found["both"].get("metrics", 0.0) < 1e-6, "metrics are stock's"


def test_each_switch_alone(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True)
    arms = {
        "other": replace(stock, micro_batch=4),
        "skip": replace(stock, lean=SKIP),
        "computed": replace(stock, lean=SKIP | COMPUTED),
        "own": replace(stock, lean=OWN),
    }
    for found in differences(ranks, folder, engine, stock, **arms):
        assert_same(found, "skip", "computed")
        assert found["skip"].get("metrics", 0.0) < 1e-6
        assert found["own"]["bitwise"] == 1.0, "the same micro-batches"
        assert found["own"].get("metrics", 0.0) == 0.0


def test_where_every_sample_has_a_gradient_the_update_is_bitwise_stock(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True)
    # The row of padding would be left out.
    both = {"skip": replace(stock, lean=SKIP, padding=False), "own": replace(stock, lean=OWN, padding=False)}
    for found in differences(ranks, folder, engine, replace(stock, padding=False), ("none",) * 2, **both):
        assert [found[name]["bitwise"] for name in both] == [1.0, 1.0]


def test_several_mini_batches_and_epochs_dynamic_batches_and_packing(ranks: Ranks, folder: Path, engine: str):
    # Later mini-batches have metrics that old log-probs do not tell: what is left out goes through a forward pass.
    stock = Arm(own=True, mini_batches=2, epochs=2)
    for found in differences(
        ranks, folder, engine, stock, other=replace(stock, micro_batch=4), skip=replace(stock, lean=SKIP)
    ):
        # Adam makes more of rounding with every one of twelve steps.
        assert_same(found, "skip", times=6.0)
        assert found["skip"].get("metrics", 0.0) <= 3 * found["other"].get("metrics", 0.0)
    # In bfloat16 six steps of Adam make tenfold differences of one rounding: three there.
    stock = Arm(own=True, tokens=40, mini_batches=2 if engine == "fsdp2" else 1, agg="seq-mean-token-mean")
    for found in differences(
        ranks, folder, engine, stock, other=replace(stock, tokens=70), skip=replace(stock, lean=SKIP)
    ):
        assert_same(found, "skip", times=6.0)
    if engine == "fsdp2":
        stock = Arm(own=True, tokens=70, packed=True)
        lean = replace(stock, lean=SKIP | OWN)
        for found in differences(ranks, folder, engine, stock, other=replace(stock, tokens=40), both=lean):
            assert_same(found, "both")


@pytest.mark.parametrize("engine", ["fsdp2"], indirect=True)
@pytest.mark.parametrize("memory", ["whole", "offloaded"])
def test_the_pass_for_metrics_leaves_parameters_and_activations_where_they_were(
    ranks: Ranks, folder: Path, engine: str, memory: str
):
    # Metrics of what is left out want a forward pass here: of the second mini-batch, and of log-probs that no other pass computed.
    for arm in (Arm(own=True, mini_batches=2), Arm(own=True)):
        lean = SKIP if arm.mini_batches > 1 else SKIP | OWN
        other, skip = replace(arm, micro_batch=4), replace(arm, lean=lean)
        for found in differences(ranks, folder, f"{engine} {memory}", arm, other=other, skip=skip):
            assert_same(found, "skip")
            assert found["skip"].get("metrics", 0.0) < 1e-6


def test_old_log_probs_of_the_update_beside_penalties(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True, actor=KL | {"entropy_coeff": 0.01, "calculate_entropy": True})
    for found in differences(ranks, folder, engine, stock, own=replace(stock, lean=OWN)):
        assert found["own"]["bitwise"] == 1.0
        assert found["own"].get("metrics", 0.0) == 0.0


@pytest.mark.parametrize("fault", ["skips a small advantage", "wrong denominator", "no step"])
def test_what_would_be_wrong_shows(ranks: Ranks, folder: Path, engine: str, fault: str):
    # Both have the sample that counts little.
    stock = Arm(own=True, fault=fault if fault.startswith("skips") else "")
    other = replace(stock, micro_batch=4)
    for found in differences(ranks, folder, engine, stock, other=other, wrong=replace(stock, lean=SKIP, fault=fault)):
        # Not on every stage of a pipeline are losses and gradient norms known.
        if "loss" in found["other"]:
            with pytest.raises(AssertionError, match="wrong"):
                assert_same(found, "wrong")
