"""A lean update is verl's: losses, gradient norms, parameters and Adam's moments after three steps, with
real workers of two ranks.

What is compared with: two of verl's own splits of the same batch into micro-batches. Shows the invariants in the
docstrings of plugins/verl_fuse_update/lean.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, Arm, compared, resumed
from small_engines import Ranks

from verl_fuse_update.losses import ROW_LOSSES

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

SKIP = {"skip_zero_gradient": True}
OWN = {"skip_old_log_prob": True}
COMPUTED = {"metrics": "computed"}
SHORT = COMPUTED | {"short_pass": True}
# Equal rewards in half of the groups; on one rank only; everywhere.
ZEROS = ("some", "rank 1", "all")
WHOLE = bool(os.environ.get("VERL_FUSE_LONG"))
LONG = pytest.mark.skipif(not WHOLE, reason="VERL_FUSE_LONG is not set")
# All is float32 on FSDP; Megatron's parameters are bfloat16.
ENGINES = ("fsdp", "fsdp2", "megatron pp1", pytest.param("megatron pp2", marks=LONG))
# Two of verl's own splits of a batch besides that into micro-batches of two rows: into larger ones, and by tokens,
# which deals rows out anew.
SPLITS: dict[str, dict[str, Any]] = {"rows": {"micro_batch": 4}, "tokens": {"tokens": 40}}
# More of them, where a gradient close to zero, of which Adam makes a whole step, decides how far parameters come apart.
MORE: dict[str, dict[str, Any]] = {"single rows": {"micro_batch": 1}, "more tokens": {"tokens": 70}}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ranks(folder: Path, engine: str) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


def differences(ranks: Ranks, folder: Path, engine: str, stock: Arm, zeros: Sequence[str] = ZEROS, **arms: Arm) -> list:
    """Of each rank: how arms differ from stock verl, by arm, and verl's splits from each other."""
    pairs = {name: ("stock", name) for name in arms}
    others = [name for name in arms if name.startswith("split by")]
    pairs |= {f"{one}, {other}": (one, other) for one, other in combinations(others, 2)}
    found = ranks.call(compared, folder, engine, {"stock": stock, **arms}, zeros, list(pairs.values()))
    return [{name: of_rank[" - ".join(pair)] for name, pair in pairs.items()} for of_rank in found]


def splits(stock: Arm, **more: dict[str, Any]) -> dict[str, Arm]:
    """The same arm with verl's other splits."""
    return {f"split by {name}": replace(stock, **change) for name, change in (SPLITS | more).items()}


# Found of each arm: how it differs from stock verl, by what is compared.
Found = dict[str, dict[str, float]]


def gap(found: Found) -> dict[str, float]:
    """Return the largest differences between verl's own splits."""
    ours = [differs for name, differs in found.items() if name.startswith("split by")]
    return {what: max(differs[what] for differs in ours) for what in ours[0]}


# An arm differs from stock verl by at most so many times what verl's own splits do in the same test.
TIMES = 2.0
# A loss is one number, by which two splits may agree by chance: of float32 rounding, of bfloat16 what a mean over a
# hundred tokens differs by.
LOSS = {"float32": 2.0**-23, "bfloat16": 1e-3}


def assert_same(found: Found, *names: str) -> None:
    """These arms differ from stock verl by no more than verl's own splits explain."""
    allowed = {what: TIMES * differs for what, differs in gap(found).items()}
    assert 0 < allowed["parameters"] < 0.1, "verl's own splits differ, by rounding"
    # Norms differ by no more than gradients do, whose average `exp_avg` is.
    allowed["grad_norm"] = allowed["exp_avg"]
    precise = allowed["parameters"] < 1e-5
    if "loss" in allowed:
        allowed["loss"] += LOSS["float32" if precise else "bfloat16"]
    for name in names:
        for what in found[name].keys() - {"metrics", "bitwise"}:
            assert found[name][what] <= allowed[what], (name, what, found)
        # verl takes means of each micro-batch: metrics depend on the split. Ours are of verl's own.
        if precise:
            assert found[name].get("metrics", 0.0) < 1e-5, (name, found)


def told(found: Found, *of: str) -> None:
    """Print the figures of the README (pytest -rP)."""
    for what in ("parameters", "exp_avg", "exp_avg_sq"):
        figures = [f"{name} {found[name][what]:.1e}" for name in found if not name.startswith("split by")]
        print(*of, what, f"splits {gap(found)[what]:.1e}", *figures, sep=" | ")


def test_samples_without_a_gradient_are_left_out(ranks: Ranks, folder: Path, engine: str):
    for loss in sorted(ROW_LOSSES) if WHOLE or engine == "fsdp" else ("gspo",):
        # Old log-probs are not the model's: ratios differ from 1 and are clipped, and no row's log-probs are known.
        stock = Arm(loss=loss)
        skip = replace(stock, lean=SKIP | {"bypass": True})
        for rank, found in enumerate(differences(ranks, folder, engine, stock, **splits(stock), skip=skip)):
            told(found, engine, loss, f"rank {rank}")
            assert_same(found, "skip")


@LONG
@pytest.mark.parametrize("loss", sorted(ROW_LOSSES))
def test_each_switch_with_every_loss(ranks: Ranks, folder: Path, engine: str, loss: str):
    stock = Arm(loss=loss, own=True)
    arms = {"skip": replace(stock, lean=SKIP), "own": replace(stock, lean=OWN), "both": replace(stock, lean=SKIP | OWN)}
    for rank, found in enumerate(differences(ranks, folder, engine, stock, **splits(stock, **MORE), **arms)):
        told(found, engine, loss, f"rank {rank}")
        assert_same(found, "skip", "both")
        assert found["own"]["bitwise"] == 1.0


def test_each_switch_alone_and_both(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True)
    arms = {
        "skip": replace(stock, lean=SKIP),
        "both": replace(stock, lean=SKIP | OWN),
        "computed": replace(stock, lean=SKIP | COMPUTED),
        "own": replace(stock, lean=OWN),
    }
    for found in differences(ranks, folder, engine, stock, **splits(stock), **arms):
        assert_same(found, "skip", "both", "computed")
        assert found["skip"].get("metrics", 0.0) < 1e-6
        assert found["both"].get("metrics", 0.0) < 1e-6
        assert found["own"]["bitwise"] == 1.0, "the same micro-batches"
        assert found["own"].get("metrics", 0.0) == 0.0


def test_where_every_sample_has_a_gradient_the_update_is_bitwise_stock(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True)
    # The row of padding would be left out.
    both = {"skip": replace(stock, lean=SKIP, padding=False), "own": replace(stock, lean=OWN, padding=False)}
    for found in differences(ranks, folder, engine, replace(stock, padding=False), ("none",) * 2, **both):
        assert [found[name]["bitwise"] for name in both] == [1.0, 1.0]


def test_several_mini_batches_and_epochs_dynamic_batches_and_packing(ranks: Ranks, folder: Path, engine: str):
    if not WHOLE and engine == "fsdp2":
        pytest.skip("VERL_FUSE_LONG is not set: FSDP2 as FSDP1")
    # Later mini-batches have metrics that old log-probs do not tell: what is left out goes through a forward pass.
    stock = Arm(own=True, mini_batches=2, epochs=2)
    for found in differences(ranks, folder, engine, stock, **splits(stock), skip=replace(stock, lean=SKIP)):
        assert_same(found, "skip")
        assert found["skip"].get("metrics", 0.0) <= TIMES * gap(found).get("metrics", 0.0)
    stock = Arm(own=True, tokens=40, mini_batches=2, agg="seq-mean-token-mean")
    others = {"split by tokens": replace(stock, tokens=70), "split by rows": replace(stock, tokens=None)}
    for found in differences(ranks, folder, engine, stock, **others, skip=replace(stock, lean=SKIP)):
        assert_same(found, "skip")
    if not engine.startswith("megatron"):
        stock = Arm(own=True, tokens=70, packed=True)
        lean, other = replace(stock, lean=SKIP | OWN), replace(stock, tokens=40)
        for found in differences(ranks, folder, engine, stock, both=lean, **{"split by tokens": other}):
            assert_same(found, "both")


def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(ranks: Ranks, folder: Path, engine: str, tmp_path: Path):
    if not WHOLE and engine != "fsdp2":
        pytest.skip("VERL_FUSE_LONG is not set: Megatron writes checkpoints slowly, and FSDP1 as FSDP2")
    stock = Arm(own=True)
    own = replace(stock, lean=OWN)
    pairs = {"stock": (stock, stock), "own then stock": (own, stock), "stock then own": (stock, own)}
    for found in ranks.call(resumed, folder, engine, stock, pairs, tmp_path):
        assert {name: differs["bitwise"] for name, differs in found.items()} == dict.fromkeys(pairs, 1.0)
        assert all(differs.get("metrics", 0.0) == 0.0 for differs in found.values()), found
    # Two mini-batches: the learning rate and the moments that go on are those of every step.
    stock = Arm(own=True, mini_batches=2)
    skip = replace(stock, lean=SKIP)
    pairs = {name: (other, other) for name, other in splits(stock).items()}
    pairs |= {"skip then stock": (skip, stock), "stock then skip": (stock, skip), "skip": (skip, skip)}
    for found in ranks.call(resumed, folder, engine, stock, pairs, tmp_path / "skip"):
        assert_same(found, "skip then stock", "stock then skip", "skip")


@LONG
@pytest.mark.parametrize("agg", ["seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"])
def test_every_way_to_aggregate(ranks: Ranks, folder: Path, engine: str, agg: str):
    stock = Arm(agg=agg, actor={"loss_scale_factor": 10} if agg.endswith("norm") else {})
    skip = replace(stock, lean=SKIP | {"bypass": True})
    for found in differences(ranks, folder, engine, stock, **splits(stock), skip=skip):
        assert_same(found, "skip")


FORMS = [
    ("fsdp", "named"),
    *(("fsdp2", form) for form in ("whole", "offloaded")),
    *(pytest.param("fsdp", form, marks=LONG) for form in ("whole", "offloaded", "lora")),
    pytest.param("fsdp2", "lora", marks=LONG),
]
# In the second step no sample has a gradient, and moments alone move parameters, which the third step reads.
NOTHING_BETWEEN = ("rank 1", "all", "some")


@pytest.mark.parametrize(("engine", "form"), FORMS, indirect=["engine"])
def test_the_pass_for_metrics_leaves_parameters_and_activations_where_they_were(
    ranks: Ranks, folder: Path, engine: str, form: str
):
    # Metrics of what is left out want a forward pass in the second mini-batch.
    stock = Arm(own=True, mini_batches=2)
    skip = replace(stock, lean=SKIP)
    for found in differences(ranks, folder, f"{engine} {form}", stock, NOTHING_BETWEEN, **splits(stock), skip=skip):
        assert_same(found, "skip")


@pytest.mark.parametrize("engine", ["fsdp"], indirect=True)
@pytest.mark.parametrize("form", ["", pytest.param(" named", marks=LONG)])
def test_parameters_left_gathered_by_the_pass_for_metrics_would_show(
    ranks: Ranks, folder: Path, engine: str, form: str
):
    stock = Arm(own=True, mini_batches=2)
    arms = {"skip": replace(stock, lean=SKIP), "wrong": replace(stock, lean=SKIP, fault="parameters stay gathered")}
    for found in differences(ranks, folder, engine + form, stock, NOTHING_BETWEEN, **splits(stock), **arms):
        assert_same(found, "skip")
        with pytest.raises(AssertionError, match="wrong"):
            assert_same(found, "wrong")


@pytest.mark.parametrize("engine", ["fsdp2"], indirect=True)
def test_computed_and_known_log_probs_share_a_micro_batch_in_bfloat16(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True)
    arms = {
        "skip": replace(stock, lean=SKIP),
        "both": replace(stock, lean=SKIP | OWN),
        "computed": replace(stock, lean=SKIP | OWN | COMPUTED),
    }
    for found in differences(ranks, folder, f"{engine} bf16", stock, **splits(stock), **arms):
        assert_same(found, *arms)
        for name in ("skip", "both"):
            assert found[name].get("metrics", 0.0) <= TIMES * gap(found).get("metrics", 0.0), found
    stock = replace(stock, mini_batches=2)
    arms = {"both": replace(stock, lean=SKIP | OWN), "short": replace(stock, lean=OWN | SHORT)}
    for found in differences(ranks, folder, f"{engine} bf16", stock, **splits(stock), **arms):
        assert_same(found, *arms)


def test_old_log_probs_of_the_update_beside_penalties(ranks: Ranks, folder: Path, engine: str):
    stock = Arm(own=True, actor=KL | {"entropy_coeff": 0.01, "calculate_entropy": True})
    for found in differences(ranks, folder, engine, stock, own=replace(stock, lean=OWN)):
        assert found["own"]["bitwise"] == 1.0
        assert found["own"].get("metrics", 0.0) == 0.0


LATER = "old log-probs of a later mini-batch are its own"


def test_the_first_of_several_mini_batches_computes_its_old_log_probs(ranks: Ranks, folder: Path, engine: str):
    if not WHOLE and engine == "fsdp2":
        pytest.skip("VERL_FUSE_LONG is not set: FSDP2 as FSDP1, and in bfloat16 above")
    stock = Arm(own=True, mini_batches=2, epochs=2, actor=KL)
    arms = {
        "own": replace(stock, lean=OWN),
        "short": replace(stock, lean=OWN | SHORT),
        "wrong": replace(stock, lean=OWN, fault=LATER),
    }
    for found in differences(ranks, folder, engine, stock, ("some", "rank 1"), **splits(stock), **arms):
        told(found, engine, "beside KL")
        # Whatever the ratio of a sample without an advantage is, it adds 0: metrics alone tell it.
        assert [found[name]["bitwise"] for name in ("own", "short")] == [1.0, 1.0]
        assert found["own"].get("metrics", 0.0) == 0.0
        if "loss" in found["wrong"]:
            assert found["wrong"]["parameters"] > TIMES * gap(found)["parameters"]
    # Of samples that are left out no epoch has old log-probs; on the other rank every sample is left out.
    stock = replace(stock, actor={}, tokens=40)
    others = {"split by tokens": replace(stock, tokens=70), "split by rows": replace(stock, tokens=None)}
    both = {"both": replace(stock, lean=SKIP | OWN), "computed": replace(stock, lean=SKIP | OWN | SHORT)}
    for found in differences(ranks, folder, engine, stock, **others, **both):
        told(found, engine, "without gradients")
        found["computed"].pop("metrics", None)
        assert_same(found, "both", "computed")
    # One mini-batch: no row has a column of old log-probs, in the second epoch either.
    stock = Arm(own=True, epochs=2)
    for found in differences(ranks, folder, engine, stock, own=replace(stock, lean=OWN)):
        assert found["own"]["bitwise"] == 1.0
        assert found["own"].get("metrics", 0.0) == 0.0


BALANCED: dict[str, dict[str, Any]] = {"padded": {}, "packed": {"packed": True}, "by tokens": {"tokens": 70}}


# Packing ran on FSDP alone; two stages leave one data-parallel rank, whose rows have nowhere to go.
@pytest.mark.parametrize(
    ("engine", "form"),
    [
        (engine, form)
        for engine in ("fsdp", "fsdp2", "megatron pp1")
        for form in BALANCED
        if form != "packed" or engine.startswith("fsdp")
    ],
    indirect=["engine"],
)
def test_rows_that_change_ranks_within_their_mini_batch(ranks: Ranks, folder: Path, engine: str, form: str):
    if not WHOLE and engine != "fsdp":
        pytest.skip("VERL_FUSE_LONG is not set")
    penalties = KL | {"entropy_coeff": 0.01, "calculate_entropy": True}
    stock = Arm(mini_batches=2, epochs=2, actor=penalties, **BALANCED[form])
    wrong = replace(stock, balance=True, fault="a row in another mini-batch")
    arms = splits(stock, **MORE) | {"balance": replace(stock, balance=True), "wrong": wrong}
    for found in differences(ranks, folder, engine, stock, zeros=("none", "some"), **arms):
        told(found, engine, form)
        # Other rows share a micro-batch, of which verl's metrics are means.
        found["balance"].pop("metrics", None)
        assert_same(found, "balance")
        if "loss" in found["wrong"]:
            with pytest.raises(AssertionError, match="wrong"):
                assert_same(found, "wrong")


@pytest.mark.parametrize("fault", ["skips a small advantage", "wrong denominator", "no step"])
def test_what_would_be_wrong_shows(ranks: Ranks, folder: Path, engine: str, fault: str):
    if not WHOLE and engine == "fsdp":
        pytest.skip("VERL_FUSE_LONG is not set: FSDP1 as FSDP2")
    # Both have the sample that counts little.
    stock = Arm(own=True, fault=fault if fault.startswith("skips") else "")
    arms = {"split by rows": splits(stock)["split by rows"], "wrong": replace(stock, lean=SKIP, fault=fault)}
    for found in differences(ranks, folder, engine, stock, **arms):
        # Not on every stage of a pipeline are losses and gradient norms known.
        if "loss" in found["wrong"]:
            with pytest.raises(AssertionError, match="wrong"):
                assert_same(found, "wrong")
