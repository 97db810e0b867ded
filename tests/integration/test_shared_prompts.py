"""With prompts computed once an actor is stock verl's: log-probs, entropies, losses, gradient norms, parameters and
Adam's moments, with real workers of two ranks.

Shows the invariants in the docstrings of verl_fuse/host/sharing/.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, Arm, compared, passes, refused_sharing
from small_engines import Ranks

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

ENTROPY = {"entropy_coeff": 0.01, "calculate_entropy": True}
FIXED = Arm(prompts=True, micro_batch=4, eps=1e-3)
PACKED, TOKENS = replace(FIXED, packed=True, micro_batch=8), replace(FIXED, packed=True, tokens=60)
ARMS = {
    "padded": FIXED,
    "padded, by tokens": replace(FIXED, tokens=60),
    "packed": PACKED,
    "by tokens": TOKENS,
    "single rows": replace(PACKED, micro_batch=1),
    "groups in two": replace(TOKENS, tokens=32),
    "KL, entropy, temperature": replace(TOKENS, temperature=0.7, actor=ENTROPY | KL, agg="seq-mean-token-mean"),
    "mini-batches, epochs": replace(TOKENS, mini_batches=4, epochs=2, actor=KL),
    "mini-batches, padded": replace(FIXED, mini_batches=2, epochs=2, micro_batch=2, actor=KL),
}
LOSSES = ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "dro")
# Which arms run with which engine (lean_engines.SHARDED).
CASES = [
    ("fsdp", ("padded", "by tokens", "mini-batches, epochs")),
    ("fsdp lora", ("by tokens",)),
    ("fsdp named", ("packed",)),
    ("fsdp2", tuple(ARMS)),
    ("fsdp2 kept", ("by tokens",)),
    ("fsdp2 lora", ("by tokens", "padded")),
    ("fsdp2 offloaded", ("by tokens",)),
    ("fsdp2 whole", ("by tokens",)),
]
# Relative differences (l2) of float32, and of log-probs: verl's own splits into micro-batches differ by up to 2e-5.
ROUNDING = 3e-6


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


def differences(ranks: Ranks, folder: Path, engine: str, stock: Arm, **arms: Arm) -> list[dict[str, dict[str, float]]]:
    """Of each rank, how arms differ from stock verl in two steps; `split` and `padding` are stock verl with other
    micro-batches."""
    single = replace(stock, tokens=None, micro_batch=1)
    other = single if single != stock else replace(stock, micro_batch=2)
    arms |= {"split": other, "padding": replace(other, packed=not stock.packed)}
    pairs = [("stock", name) for name in arms]
    found = ranks.call(compared, folder, engine, {"stock": stock, **arms}, ("some", "none"), pairs)
    return [{name: of_rank[f"stock - {name}"] for name in arms} for of_rank in found]


def require_rounding(found: dict[str, dict[str, float]], same_micro_batches: bool = False) -> None:
    """All differences are rounding: about what verl's own splits differ by. A metric that verl averages over
    micro-batches is another one where these are."""
    splits = [found.pop("split"), found.pop("padding")]
    for arm, differs in found.items():
        for what in differs.keys() - {"bitwise"} - (set() if same_micro_batches and arm != "placed" else {"metrics"}):
            most = max(ROUNDING, 4 * max(split[what] for split in splits) if what != "metrics" else 0.0)
            assert differs[what] <= most, (arm, what, found, splits)


@pytest.mark.parametrize(("engine", "names"), CASES, ids=[engine for engine, _ in CASES])
def test_updates_and_passes_are_stock_verls(ranks: Ranks, folder: Path, engine: str, names: tuple[str, ...]):
    for name in names:
        stock = ARMS[name]
        arms = {"ours": replace(stock, share=True), "placed": replace(stock, share=True, balance=True)}
        responses = {"responses": replace(stock, share=True, responses=True)}
        both = arms | (responses if name in ("padded", "by tokens") else {})
        for found in differences(ranks, folder, engine, stock, **both):
            require_rounding(found, same_micro_batches=not stock.tokens)
        alone = {"stock": stock, "ours": arms["ours"], **responses}
        whole = ranks.call(passes, folder, engine, {name: replace(arm, balance=True) for name, arm in alone.items()})
        for found in whole:
            stock_pass, ours, responses = found["stock"], found["ours"], found["responses"]
            assert stock_pass["prompts"] == (0, 0)
            prompts, computed = ours["prompts"]
            least = sum(tokens for _, tokens in ours["groups"])
            assert prompts == sum(rows * tokens for rows, tokens in ours["groups"])
            if stock.tokens and name != "groups in two":
                assert computed == least
            elif name == "single rows":
                assert computed == prompts
            else:
                assert least <= computed < prompts
            assert ours["logits"] == ours["tokens"] - (prompts - computed)
            assert responses["logits"] == responses["responses"] < ours["logits"] <= stock_pass["logits"]
            for key in {"log_probs", "entropy"} & ours.keys():
                assert (stock_pass[key] - ours[key]).abs().max() <= ROUNDING
                assert (stock_pass[key] - responses[key]).abs().max() <= ROUNDING


def test_turns_of_a_conversation_share_their_beginnings(ranks: Ranks, folder: Path):
    stock = replace(TOKENS, turns=True)
    for arm in (stock, replace(stock, mini_batches=2, epochs=2, actor=KL), replace(FIXED, turns=True)):
        placed = replace(arm, share=True, balance=True)
        for found in differences(ranks, folder, "fsdp2", arm, placed=placed):
            require_rounding(found)
    arms = {"stock": replace(stock, balance=True), "ours": replace(stock, share=True, balance=True)}
    whole, saved = ranks.call(passes, folder, "fsdp2", arms), 0
    for found in whole:
        prompts, computed = found["ours"]["prompts"]
        # What rows of the same whole prompt save.
        saved += prompts - computed - sum((rows - 1) * tokens for rows, tokens in found["ours"]["groups"])
        assert (found["stock"]["log_probs"] - found["ours"]["log_probs"]).abs().max() <= ROUNDING
    assert saved > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_stock_verls(ranks: Ranks, folder: Path, loss: str):
    agg = "seq-mean-token-mean" if loss in ("gspo", "sapo") else "token-mean"
    stock = replace(TOKENS, loss=loss, agg=agg)
    for found in differences(ranks, folder, "fsdp2", stock, ours=replace(stock, share=True, balance=True)):
        require_rounding(found)


def test_lean_updates_share_what_they_compute(ranks: Ranks, folder: Path):
    for stock in (replace(TOKENS, own=True), replace(TOKENS, own=True, mini_batches=2, epochs=2)):
        lean = replace(stock, lean={"skip_zero_gradient": True, "skip_old_log_prob": True})
        for found in differences(ranks, folder, "fsdp2", stock, ours=replace(lean, share=True, balance=True)):
            require_rounding(found)


def test_bfloat16_is_no_farther_from_float32_than_stock_verl_is(ranks: Ranks, folder: Path):
    arms = {"stock": TOKENS, "ours": replace(TOKENS, share=True)}
    exact = ranks.call(passes, folder, "fsdp2", {"stock": TOKENS})
    rounded = ranks.call(passes, folder, "fsdp2 bf16", arms)
    far = {
        arm: sum(float((mine[arm]["log_probs"] - right["stock"]["log_probs"]).square().sum()) for mine, right in pairs)
        for arm in arms
        for pairs in [list(zip(rounded, exact, strict=True))]
    }
    assert 0 < far["ours"] <= 1.5 * far["stock"]
    # Old log-probs of a pass in other micro-batches are those of the update: the first ratio is 1.
    ours = replace(TOKENS, share=True)
    alone = ranks.call(passes, folder, "fsdp2 bf16", {"a": ours, "b": replace(ours, tokens=32)})
    for found in alone:
        assert (found["a"]["log_probs"] == found["b"]["log_probs"]).all()


@pytest.mark.parametrize(
    "fault",
    ["a branch sees its sibling", "positions restart at a branch", "the prompt's last token is shared"],
)
def test_wrong_rows_show(ranks: Ranks, folder: Path, fault: str):
    for found in differences(ranks, folder, "fsdp2", TOKENS, wrong=replace(TOKENS, share=True, fault=fault)):
        assert found["wrong"]["parameters"] > 1e-3, found


def test_a_row_in_another_mini_batch_shows(ranks: Ranks, folder: Path):
    stock = replace(TOKENS, mini_batches=2)
    wrong = replace(stock, share=True, balance=True, fault="a row in another mini-batch")
    for found in differences(ranks, folder, "fsdp2", stock, wrong=wrong):
        assert found["wrong"]["parameters"] > 1e-3, found


def test_models_that_cannot_are_refused_or_left_as_they_are(ranks: Ranks, folder: Path):
    on, off = "fuse.update.share_prompts=true: not with ", "; false computes each sample's prompt"
    for found in ranks.call(refused_sharing, folder):
        assert found.pop("left") == ["FSDPEngineWithLMHead"] * 6
        assert found.pop("replaced").startswith("fuse.update.share_prompts=true: 1 of the model's 2 layers attend by")
        assert found.pop("called").startswith("fuse.update.share_prompts=true: the model was called without a plan")
        run = ": llama, qwen2, qwen3, qwen3_moe, mistral, gemma, gemma2, gemma3_text were run"
        assert found.pop("type").startswith(f"{on}a model of type other (")
        assert found == {
            "code": f"{on}a model of type llama (transformers_modules.own){run}{off}",
            "ahead": f"{on}attention that looks ahead{off}",
            "rope": f"{on}rope_type=dynamic, by the longest row of a micro-batch{off}",
            "layer": f"{on}use_ulysses_sp=true of its engine and dropout, which samples would share{off}",
            "engine": f"{on}use_ulysses_sp=true of its engine{off}",
            "dropout": f"{on}attention_dropout=0.1{off}",
            "router": f"{on}output_router_logits=true, a loss over a micro-batch's tokens{off}",
            "softcap": f"{on}attn_logit_softcapping=30.0 and attn_implementation=eager: flash_attention_2 has it{off}",
        }
