"""A streamed update is verl's: losses, gradient norms, parameters and Adam's moments after three steps, with real
workers of two and four ranks, in one shard group and in several.

What is compared with: verl's own split of the same batch into other micro-batches. Shows the invariants in the
docstrings of plugins/verl_fuse_update/stream.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, Arm
from small_engines import Ranks
from stream_engines import Plan, compared, dropped, held_between

from verl_fuse_update.losses import ROW_LOSSES

pytest.importorskip("verl")
fsdp = pytest.importorskip("torch.distributed.fsdp")
NEEDS = "needs torch 2.13: 2.11 has no FSDPModule.reset_iter_state"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not hasattr(fsdp.FSDPModule, "reset_iter_state"), reason=NEEDS),
]

SKIP = {"skip_zero_gradient": True, "skip_old_log_prob": True}
OWN = {"skip_old_log_prob": True}
WHOLE = bool(os.environ.get("VERL_FUSE_LONG"))
LONG = pytest.mark.skipif(not WHOLE, reason="VERL_FUSE_LONG is not set")
# Ranks, and those of a shard group: all of them, one, two.
LAYOUTS = {"1-D": (2, -1), "2x1": (2, 1), "2x2": (4, 2)}
ZEROS = ("some", "rank 1", "all") if WHOLE else ("some", "all")
SPLITS: dict[str, dict[str, Any]] = {"rows": {"micro_batch": 4}, "tokens": {"tokens": 40}}
# More of them, where a gradient close to zero, of which Adam makes a whole step, decides how far parameters come apart.
MORE: dict[str, dict[str, Any]] = {"single rows": {"micro_batch": 1}, "more tokens": {"tokens": 70}}
# An arm differs from stock verl by at most so many times what verl's own splits do in the same test: it deals rows out
# to other ranks as well, and divides gradients once more.
TIMES = 8.0
LOSS = 2.0**-22


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=LONG)))
def ranks(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[int, Ranks]]:
    with Ranks(request.param, folder) as ranks:
        yield request.param, ranks


def layouts(size: int) -> list[str]:
    return [name for name, (needed, _) in LAYOUTS.items() if needed == size]


Found = dict[str, dict[str, float]]


def differences(
    ranks: Ranks,
    folder: Path,
    layout: str,
    stock: Arm,
    ours: dict[str, tuple[Arm, Plan]],
    zeros: Any = ZEROS,
    form: str = "",
    **more: Any,
) -> list[Found]:
    """Of each rank: how arms differ from stock verl, by name; `more`: splits of verl's own beside SPLITS."""
    splits = {f"split by {name}": replace(stock, **change) for name, change in (SPLITS | more).items()}
    return ranks.call(compared, folder, LAYOUTS[layout][1], {"stock": stock, **splits}, ours, zeros, form)


def assert_same(found: Found, *names: str) -> None:
    """These arms differ from stock verl by no more than verl's own splits explain."""
    split = [differs for name, differs in found.items() if name.startswith("split by")]
    allowed = {what: TIMES * max(differs[what] for differs in split) for what in split[0]}
    assert 0 < allowed["parameters"] < 1e-4, ("verl's own splits differ, by rounding", found)
    allowed["grad_norm"], allowed["loss"] = allowed["exp_avg"], allowed["loss"] + LOSS
    for name in names:
        for what in found[name].keys() - {"metrics", "bitwise"}:
            assert found[name][what] <= allowed[what], (name, what, found)
        assert found[name]["metrics"] < 1e-5, (name, found)


def told(found: Found, *of: str) -> None:
    """Print the figures of the README (pytest -rP)."""
    for what in ("parameters", "exp_avg", "exp_avg_sq"):
        figures = [f"{name} {differs[what]:.1e}" for name, differs in found.items() if what in differs]
        print(*of, what, *figures, sep=" | ")


@pytest.mark.parametrize("loss", sorted(ROW_LOSSES) if WHOLE else ("sapo", "vanilla"))
def test_with_each_loss(ranks: tuple[int, Ranks], folder: Path, loss: str):
    size, running = ranks
    for layout in layouts(size):
        # That of sapo is a mean over samples, whatever the configuration says.
        stock = Arm(loss=loss, own=True, agg="seq-mean-token-mean" if loss == "sapo" else "token-mean")
        ours = {
            "all": (replace(stock, lean=OWN), Plan()),
            "skip": (replace(stock, lean=SKIP), Plan(both=True)),
            "computed": (replace(stock, lean=SKIP | {"metrics": "computed"}), Plan(first_alone=True)),
            "logits of responses": (replace(stock, lean=SKIP, responses=True), Plan(both=True)),
        }
        for rank, found in enumerate(differences(running, folder, layout, stock, ours)):
            told(found, layout, loss, f"rank {rank}")
            assert_same(found, *ours)


MEANS = ("token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum", "seq-mean-token-mean")


@pytest.mark.parametrize("agg", MEANS if WHOLE else MEANS[:2])
def test_with_each_mean_and_with_kl_and_entropy(ranks: tuple[int, Ranks], folder: Path, agg: str):
    size, running = ranks
    for layout in layouts(size):
        actor: dict[str, Any] = {**KL, "entropy_coeff": 0.01, "loss_scale_factor": 20}
        stock = Arm(agg=agg, own=True, actor=actor)
        ours = {"streamed": (replace(stock, lean=OWN), Plan(early=((2, 0), (3,))))}
        for found in differences(running, folder, layout, stock, ours, ("some",), **MORE):
            assert_same(found, "streamed")


PACKED = {"packed": True, "tokens": 40}
BY_TOKENS = ({"tokens": 40}, {"tokens": 70}, {"tokens": 30})


@pytest.mark.parametrize("form", ["", "kept"])
def test_packed_rows_and_activations_that_are_kept(ranks: tuple[int, Ranks], folder: Path, form: str):
    size, running = ranks
    stock = Arm(own=True, **PACKED)
    ours = {
        "all": (replace(stock, lean=OWN), Plan(splits=BY_TOKENS)),
        "skip": (replace(stock, lean=SKIP), Plan(both=True, splits=BY_TOKENS)),
    }
    tokens = {"rows": {"tokens": 30}, "tokens": {"tokens": 70}, "other tokens": {"tokens": 100}}
    for found in differences(running, folder, layouts(size)[-1], stock, ours, ("some", "none"), form, **tokens):
        told(found, form, "packed")
        assert_same(found, *ours)


def test_in_bfloat16(ranks: tuple[int, Ranks], folder: Path):
    size, running = ranks
    stock = Arm(own=True)
    ours = {
        "all": (replace(stock, lean=OWN), Plan()),
        "skip": (replace(stock, lean=SKIP), Plan(both=True)),
        "wrong": (replace(stock, lean=OWN), Plan(fault="row twice")),
    }
    for found in differences(running, folder, layouts(size)[-1], stock, ours, ("some", "none"), "bf16", **MORE):
        told(found, "bf16")
        split = [differs for name, differs in found.items() if name.startswith("split by")]
        allowed = {what: TIMES * max(differs[what] for differs in split) for what in ("parameters", "exp_avg")}
        for what, most in allowed.items():
            assert most > 0
            assert max(found[name][what] for name in ("all", "skip")) <= most, (what, found)
        assert found["wrong"]["exp_avg"] > allowed["exp_avg"], found


def test_two_groups_of_two_ranks(folder: Path):
    stock = Arm(own=True)
    ours = {"skip": (replace(stock, lean=SKIP), Plan()), "all": (replace(stock, lean=OWN), Plan(first_alone=True))}
    with Ranks(4, folder) as running:
        for found in differences(running, folder, "2x2", stock, ours, ("some",)):
            assert_same(found, *ours)


def test_ranks_stream_while_others_are_busy(ranks: tuple[int, Ranks], folder: Path):
    size, running = ranks
    for layout in [name for name in layouts(size) if name != "1-D"]:
        stock = Arm(own=True)
        ours = {"streamed": (replace(stock, lean=OWN), Plan(busy=True))}
        for found in differences(running, folder, layout, stock, ours, ("some",)):
            assert_same(found, "streamed")


@pytest.mark.parametrize("fault", ["row dropped", "row twice", "not scaled"])
def test_what_must_show_does(ranks: tuple[int, Ranks], folder: Path, fault: str):
    size, running = ranks
    stock = Arm(own=True, padding=False)
    ours = {"wrong": (replace(stock, lean=OWN), Plan(fault=fault))}
    for found in differences(running, folder, layouts(size)[-1], stock, ours, ("none",)):
        with pytest.raises(AssertionError):
            assert_same(found, "wrong")


@pytest.mark.parametrize("fault", ["none", "micro-batch", "kept"])
def test_what_is_dropped_leaves_nothing(ranks: tuple[int, Ranks], folder: Path, fault: str):
    size, running = ranks
    for layout in layouts(size):
        stock = Arm(own=True)
        found = running.call(dropped, folder, LAYOUTS[layout][1], stock, replace(stock, lean=SKIP), fault)
        if fault == "kept":
            # Nobody dropped it: verl's update must not begin on top.
            assert found[-1]["left"] > 0
            assert "wait for theirs" in found[-1]["said"]
            continue
        assert found[-1]["said"] == ("planted" if fault == "micro-batch" else "")
        assert [(one["left"], one["stock"], one["streamed"]) for one in found] == [(0, True, True)] * size


def test_four_bytes_per_parameter_of_the_shard_wait(ranks: tuple[int, Ranks], folder: Path):
    size, running = ranks
    for layout in layouts(size):
        for held, same in running.call(held_between, folder, LAYOUTS[layout][1], Arm(lean=OWN, own=True)):
            assert held == pytest.approx(4.0, abs=0.1)
            assert same
