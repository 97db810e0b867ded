"""With logits of responses alone an actor is stock verl's: log-probs, entropies, losses, gradient norms, parameters and
Adam's moments, with real workers of two ranks.

Shows the invariants in the docstring of verl_fuse/host/inference/response_logits.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, SAMPLES, Arm, compared, passes, refused_models
from small_engines import Ranks

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

ENTROPY = {"entropy_coeff": 0.01, "calculate_entropy": True}
ARMS = {
    "padded": Arm(),
    "padded, by tokens": Arm(tokens=40),
    "packed": Arm(packed=True),
    "packed, by tokens": Arm(packed=True, tokens=40),
    "single packed rows": Arm(packed=True, micro_batch=1),
    "entropy, temperature, mini-batches": Arm(temperature=0.7, actor=ENTROPY, mini_batches=2, epochs=2),
    "KL, packed": Arm(packed=True, temperature=1.0, actor=ENTROPY | KL, loss="gspo", agg="seq-mean-token-mean"),
}
# Which arms run with which engine (lean_engines.SHARDED).
CASES = [
    ("fsdp", ("padded, by tokens", "packed, by tokens")),
    ("fsdp lora", ("KL, packed",)),
    ("fsdp shared", ("single packed rows",)),
    ("fsdp2", ("padded", "packed", "packed, by tokens", "entropy, temperature, mini-batches")),
    ("fsdp2 bf16", ("padded", "packed, by tokens")),
    ("fsdp2 kept", ("padded, by tokens", "packed, by tokens")),
    ("fsdp2 lora", ("padded, by tokens", "KL, packed")),
    ("fsdp2 offloaded", ("packed, by tokens",)),
    # A row of an odd number of tokens is padded before ranks share it; of a single row one rank may have prompt alone.
    ("fsdp2 shared", ("single packed rows", "KL, packed")),
]
# Relative differences (l2) of float32, and of log-probs: verl's own splits into micro-batches differ by up to 2e-5.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


def worst(found: dict[str, float]) -> float:
    """The largest difference of an arm from stock verl, metrics included."""
    return max(differs for what, differs in found.items() if what != "bitwise")


def differences(ranks: Ranks, folder: Path, engine: str, stock: Arm, **arms: Arm) -> list[dict[str, dict[str, float]]]:
    """Of each rank, how arms differ from stock verl in two steps."""
    pairs = [("stock", name) for name in arms]
    found = ranks.call(compared, folder, engine, {"stock": stock, **arms}, ("some", "none"), pairs)
    return [{name: of_rank[f"stock - {name}"] for name in arms} for of_rank in found]


@pytest.mark.parametrize(("engine", "names"), CASES, ids=[engine for engine, _ in CASES])
def test_updates_and_passes_are_stock_verls(ranks: Ranks, folder: Path, engine: str, names: tuple[str, ...]):
    for name in names:
        stock = ARMS[name]
        ours = replace(stock, responses=True)
        for found in differences(ranks, folder, engine, stock, ours=ours):
            assert worst(found["ours"]) <= ROUNDING, (engine, name, found)
        whole = ranks.call(passes, folder, engine, {"stock": stock, "ours": ours})
        computed, of_stock = (sum(found[arm]["logits"] for found in whole) for arm in ("ours", "stock"))
        answers, tokens = (sum(found["ours"][what] for found in whole) for what in ("responses", "tokens"))
        if engine.endswith("shared"):
            # Each rank has the tokens of all rows.
            answers, tokens = answers // 2, tokens // 2
        assert answers < tokens <= of_stock
        if name == "single packed rows":
            assert answers < computed < answers + SAMPLES, "one position of a prompt where there is no response"
        elif stock.packed:
            assert computed == answers
        else:
            assert answers <= computed < of_stock, "from the first response to the last"
        for found in whole:
            same_responses(found["stock"], found["ours"], computed - answers if stock.packed else 0)


def same_responses(stock: dict[str, Any], ours: dict[str, Any], others: int) -> None:
    """Both have the same values of responses; ours has values of so many other tokens."""
    assert stock.keys() == ours.keys()
    for key in {"log_probs", "entropy"} & ours.keys():
        assert (stock[key] - ours[key]).abs().max() <= ROUNDING
        # Nothing reads them; stock verl computes them all.
        assert ours[f"other {key}"].count_nonzero() == others
        assert stock[f"other {key}"].abs().min() > 0


def test_lean_updates_are_the_same_with_logits_of_responses_alone(ranks: Ranks, folder: Path):
    lean = Arm(own=True, packed=True, tokens=40, lean={"skip_zero_gradient": True, "skip_old_log_prob": True})
    for found in differences(ranks, folder, "fsdp2", lean, ours=replace(lean, responses=True)):
        assert worst(found["ours"]) <= ROUNDING


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp2 shared"])
def test_positions_that_are_off_by_one_show(ranks: Ranks, folder: Path, engine: str):
    for stock in (ARMS["packed"], *([ARMS["padded"]] if engine == "fsdp2" else [])):
        wrong = replace(stock, responses=True, fault="off by one")
        for found in differences(ranks, folder, engine, stock, wrong=wrong):
            assert worst(found["wrong"]) > 0.01
            assert found["wrong"]["parameters"] > 0.01


def test_models_that_cannot_are_refused_or_left_as_they_are(ranks: Ranks, folder: Path):
    (folder / "critic").symlink_to(folder / "actor")
    on, off = "fuse.update.response_logits=true: not with ", "; false computes logits of all tokens"
    for found in ranks.call(refused_models, folder):
        assert found.pop("ignored").endswith("; false computes those of all")
        assert found.pop("left") == ["FSDPEngineWithValueHead", *["FSDPEngineWithLMHead"] * 3]
        assert found == {
            "critic": f"{on}the engine FSDPEngineWithValueHead{off}",
            "tower": f"{on}a model that has vision_config{off}",
            "forward": f"{on}Whole, whose forward pass takes no logits_to_keep{off}",
            "remote": f"{on}Remote, whose code is not transformers'{off}",
        }
