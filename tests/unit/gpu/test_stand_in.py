"""The invariants in the docstring of ci/gpu/stand_in/flash_attn, and the comparison that looks at it on a device. Torch
has its flash kernels for packed rows on CUDA alone: here plain attention takes their place."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from ci.gpu import attention  # noqa: E402
from ci.gpu.pack import STAND_IN  # noqa: E402


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STAND_IN))
    import flash_attn

    yield flash_attn
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Torch's kernels with their arguments in torch's order (checked against its schema)."""

    def forward(query, key, value, offsets, key_offsets, longest, longest_key, dropout, causal, debug, *, scale=None):
        assert (dropout, debug, scale, offsets.tolist()) == (0.0, False, None, key_offsets.tolist())
        out = attention.plain(query, key, value, offsets, longest, causal)
        return out, torch.full((1,), 1.0), torch.full((1,), 2.0), torch.full((1,), 3.0), torch.empty(0)

    def backward(
        grad, query, key, value, out, sums, offsets, key_offsets, longest, longest_key, dropout, causal, state, unused,
        *, scale=None,
    ):  # fmt: skip
        assert [each.item() for each in (sums, state, unused)] == [1.0, 2.0, 3.0]
        own = [each.detach().requires_grad_() for each in (query, key, value)]
        with torch.enable_grad():
            again = attention.plain(*own, offsets, longest, causal)
        assert torch.equal(again, out)
        return torch.autograd.grad(again, own, grad)

    for name, function, last in (("forward", forward, "return_debug_mask"), ("backward", backward, "unused")):
        names = [each.name for each in getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema.arguments]
        assert names.index(last) == function.__code__.co_argcount - 1
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", function)


def test_results_and_gradients_are_those_of_plain_attention(flash_attn, kernels):
    found = attention.compare(attention.installed, "cpu")
    assert {far == near for far, near in found.values()} == {True}
    assert len(found) == 8
    assert attention.main(["--device", "cpu"]) == 0


@pytest.mark.parametrize("wrong", ["masks nothing", "mixes rows", "is not a number"])
def test_an_attention_that_is_wrong_is_a_fault(wrong: str):
    def function(query, key, value, offsets, longest, causal):
        if wrong == "mixes rows":
            offsets = offsets[[0, -1]]
        out = attention.plain(query, key, value, offsets, longest, causal and wrong != "masks nothing")
        return out * float("nan") if wrong == "is not a number" else out

    faults = attention.faults(attention.compare(function, "cpu"))
    assert len(faults) == (4 if wrong == "masks nothing" else 8)
    assert attention.faults(attention.compare(attention.plain, "cpu")) == []


def test_rows_of_one_length_are_packed(flash_attn, kernels):
    rows = [torch.randn(3, 5, heads, 8) for heads in (4, 2, 2)]
    flat = [each.flatten(0, 1) for each in rows]
    wanted = attention.plain(*flat, torch.arange(0, 16, 5), 5, True)
    assert torch.equal(flash_attn.flash_attn_func(*rows, causal=True), wanted.view(3, 5, 4, 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("window_size", (16, 0)),
        ("softcap", 30.0),
        ("alibi_slopes", torch.ones(2)),
        ("deterministic", True),
        ("return_attn_probs", True),
        ("block_table", torch.ones(2)),
    ],
)
def test_what_it_does_not_compute_is_refused(flash_attn, kernels, name: str, value):
    rows = torch.randn(6, 2, 8)
    offsets = torch.tensor([0, 6])
    with pytest.raises(NotImplementedError, match=f"without {name}$"):
        flash_attn.flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 6, 6, **{name: value})


def test_the_names_that_verl_vllm_and_transformers_import_are_there(flash_attn):
    from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
    from flash_attn.ops.triton.rotary import apply_rotary

    assert Path(flash_attn.__file__).is_relative_to(STAND_IN)
    assert all(map(callable, (index_first_axis, rearrange)))
    rows = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    kept, places, offsets, longest, _ = unpad_input(rows, mask)
    assert (offsets.tolist(), longest) == ([0, 2, 3], 2)
    assert torch.equal(pad_input(kept, places, 2, 3), rows * mask[..., None])
    for refused in (apply_rotary, flash_attn.flash_attn_with_kvcache):
        with pytest.raises(NotImplementedError):
            refused(rows)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("kind", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_losses_and_gradients_are_those_of_torch(flash_attn, monkeypatch: pytest.MonkeyPatch, kind, near, inplace):
    from flash_attn.ops.triton import cross_entropy

    monkeypatch.setattr(cross_entropy, "ROWS", 3)
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=numbers).mul_(5).to(kind)
    labels = torch.tensor([0, 10, 3, -100, 4, 4, 9])
    weights = torch.arange(1.0, 8.0)

    exact = logits.float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (gradient,) = torch.autograd.grad((wanted * weights).sum(), exact)

    own = logits.clone().requires_grad_()
    given = own * 1
    losses, others = cross_entropy.cross_entropy_loss(given, labels, inplace_backward=inplace)
    (found,) = torch.autograd.grad((losses * weights).sum(), given)
    assert (losses.dtype, found.dtype, others.tolist()) == (torch.float32, kind, [0.0] * 7)
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.float(), gradient, rtol=near, atol=near)
    assert (found.data_ptr() == given.data_ptr()) is inplace
    assert torch.equal(given, logits) is not inplace


def test_verl_takes_log_probs_from_it(flash_attn, monkeypatch: pytest.MonkeyPatch):
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from verl.utils import torch_functional

    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.setattr(torch_functional, "cross_entropy_loss", cross_entropy_loss, raising=False)
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 4, 1], [2, 3, 0]])
    torch.testing.assert_close(
        torch_functional.logprobs_from_logits(logits, labels),
        torch_functional.logprobs_from_logits_naive(logits, labels),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precomputed_lse", torch.ones(2)),
        ("label_smoothing", 0.1),
        ("logit_scale", 2.0),
        ("lse_square_scale", 1e-4),
        ("process_group", object()),
    ],
)
def test_another_loss_is_refused(flash_attn, name: str, value):
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    with pytest.raises(NotImplementedError, match=f"without {name}$"):
        cross_entropy_loss(torch.ones(2, 3), torch.tensor([0, 1]), **{name: value})
