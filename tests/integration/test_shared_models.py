"""With prompts computed once each type of model that may share them is the same: log-probs of responses and gradients
of all parameters are those of plain rows, one by one, with transformers' own attention. All in this process.

Shows the invariants in the docstring of verl_fuse/host/sharing/attention.py.
"""

import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest

pytest.importorskip("verl")
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils

with warnings.catch_warnings():
    # verl's engines warn of packages that are not installed.
    warnings.simplefilter("ignore")
    from verl_fuse.host.sharing.attention import NAME, _Gathered
    from verl_fuse.host.sharing.engine import MODEL_TYPES
    from verl_fuse.host.sharing.plan import SharedPlan

pytestmark = pytest.mark.integration

VOCABULARY, LAYERS = 64, 2
# Tokens of prompts; the prompt of each row, tokens of its response, and its advantage. The last prompt has one row.
PROMPTS = (9, 1, 6)
ROWS = ((0, 5, 1.0), (1, 7, -0.5), (0, 2, -1.5), (2, 4, 0.7), (1, 3, 2.0), (0, 6, 0.3))
# Shorter than a prompt, and than some responses: it ends in the prompt or in the branch.
WINDOW = 4
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA2 = ALTERNATING | {"query_pre_attn_scalar": 4, "final_logit_softcapping": 5.0}
# What the configuration of each type gets; `query_pre_attn_scalar` is not the size of a head, which it would replace.
# A window is in all layers (qwen3_moe, mistral), or in one of the two.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, later window": ("qwen2", LATER),
    "qwen3": ("qwen3", {}),
    "qwen3, window": ("qwen3", ALTERNATING | {"use_sliding_window": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe, window": ("qwen3_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "gemma": ("gemma", {}),
    "gemma2, window": ("gemma2", GEMMA2 | {"attn_logit_softcapping": None}),
    "gemma3_text, window": ("gemma3_text", ALTERNATING | {"query_pre_attn_scalar": 4}),
}
FLASH: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": MODELS["llama"],
    "mistral, window": MODELS["mistral, window"],
    "gemma2, window, softcap": ("gemma2", GEMMA2 | {"attn_logit_softcapping": 0.5}),
}
WINDOWS = {name: case for name, case in MODELS.items() if "window" in name}
# Differences that are rounding of float32: of a log-prob, and of all gradients together (relative, l2). Most that was
# seen: 1e-6 and 7e-7.
LOG_PROB, GRADIENT = 1e-5, 1e-5
# What a fault makes of log-probs.
FAULT = 1e-3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads make small models slower, far more so where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows() -> list[torch.Tensor]:
    """The tokens of each row."""
    draw = torch.Generator().manual_seed(1)

    def some(number: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (number,), generator=draw)

    prompts = [some(tokens) for tokens in PROMPTS]
    return [torch.cat([prompts[prompt], some(answer)]) for prompt, answer, _ in ROWS]


def shared_plan(kernel: str) -> SharedPlan:
    _, answers, _ = zip(*ROWS, strict=True)
    groups = [(prompt, PROMPTS[prompt] - 1) for prompt, _, _ in ROWS]
    return SharedPlan([len(row) for row in rows()], answers, groups, torch.device("cpu"), kernel)


def build(kind: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A random model of two layers; the same parameters for the same `kind` and sizes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # livelier than a fresh model
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases that are not 0, norms that are not 1
    return model.train()


def log_probs(model: PreTrainedModel, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Of each token's successor in a row without padding."""
    logits = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
    return logits.log_softmax(-1).gather(-1, tokens.roll(-1)[:, None])[:, 0]


def alone(model: PreTrainedModel) -> torch.Tensor:
    """Log-probs of responses with each row computed by itself, by the attention that the model was built with."""
    model.config._attn_implementation = "eager"
    pairs = zip(rows(), ROWS, strict=True)
    return torch.cat([log_probs(model, row)[-answer - 1 : -1] for row, (_, answer, _) in pairs])


def shared(model: PreTrainedModel, plan: SharedPlan) -> torch.Tensor:
    """Log-probs of responses with all rows computed at once, each prompt once."""
    model.config._attn_implementation = NAME
    tokens = torch.cat(rows())[plan.kept]
    positions = torch.cat([torch.arange(len(row)) for row in rows()])[plan.kept]
    found = log_probs(model, tokens, position_ids=positions[None], shared_prompts=plan)[plan.expanded]
    ends = accumulate(len(row) for row in rows())
    return torch.cat([found[end - answer - 1 : end - 1] for end, (_, answer, _) in zip(ends, ROWS, strict=True)])


def gradient(model: PreTrainedModel, found: torch.Tensor) -> torch.Tensor:
    """Return the gradient of all parameters, of the log-probs of responses by their rows' advantages."""
    model.zero_grad()
    advantages = torch.cat([torch.full((answer,), advantage) for _, answer, advantage in ROWS])
    (advantages * found).sum().backward()
    gradients = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients.append(parameter.grad.flatten())
    return torch.cat(gradients)


def require_the_same(case: tuple[str, dict[str, Any]], kernel: str, checkpoints: bool) -> None:
    """Log-probs and gradients with a plan are those of plain rows; with `checkpoints` each layer is computed again."""
    model = build(*case)
    expected = alone(model)
    right = gradient(model, expected)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    for name, part in model.named_modules():
        if name.endswith("self_attn"):
            part.register_forward_pre_hook(lambda *_: calls.append(1))
    found = shared(model, shared_plan(kernel))
    mine = gradient(model, found)
    assert len(calls) == LAYERS * (2 if checkpoints else 1)
    assert (found - expected).abs().max() <= LOG_PROB
    assert (mine - right).norm() <= GRADIENT * right.norm()


def reference_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """flash-attn's function of this name, in float32: `q` is [tokens, heads, size], `k` and `v` may have fewer heads;
    the last query of a segment is at its last key."""
    assert {tensor.dtype for tensor in (q, k, v)} == {torch.float32}
    assert {starts.dtype for starts in (cu_seqlens_q, cu_seqlens_k)} == {torch.int32}
    assert (int(cu_seqlens_q[0]), int(cu_seqlens_k[0])) == (0, 0)
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k))
    assert len(k) == len(v)
    assert [type(most) for most in (max_seqlen_q, max_seqlen_k)] == [int, int]
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    assert causal is True
    assert dropout_p == 0.0
    left = window_size[0] if window_size[0] >= 0 else len(k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    copies = q.shape[1] // k.shape[1]
    bounds = (pairwise(starts.tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
    parts = []
    for (first, end), (key, key_end) in zip(*bounds, strict=True):
        keys, values = (tensor[key:key_end].repeat_interleave(copies, 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(end - first)[:, None] + (key_end - key) - (end - first)
        behind = places - torch.arange(key_end - key)
        # A causal call has no window to the right, whatever `window_size` says.
        scores = scores.masked_fill((behind < 0) | (behind > left), float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """transformers calls the reference in place of flash-attn; returns the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def recorded(*tensors: Any, **arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return reference_flash(*tensors, **arguments)

    def imported(implementation: str) -> tuple[tuple[Callable[..., torch.Tensor] | None, ...], Callable[..., Any]]:
        assert implementation == "flash_attention_2"
        return (None, recorded, None, None, None), utils._lazy_define_process_function(reference_flash)

    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "lazy_import_flash_attention", imported)
    return calls


def test_all_types_are_here():
    assert {kind for kind, _ in MODELS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_share_are_plain_rows(name: str, checkpoints: bool):
    require_the_same(MODELS[name], "sdpa", checkpoints)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
@pytest.mark.parametrize("name", FLASH)
def test_rows_that_share_are_plain_rows_with_flash_attention(name: str, checkpoints: bool, flash: list[dict[str, Any]]):
    require_the_same(FLASH[name], "flash_attention_2", checkpoints)
    assert len(flash) == LAYERS * (2 if checkpoints else 1)
    window = (WINDOW - 1, WINDOW - 1)
    layers = {"llama": {None}, "mistral, window": {window}, "gemma2, window, softcap": {window, None}}
    assert {call.get("window_size") for call in flash} == layers[name]
    assert {call.get("softcap") for call in flash} == {FLASH[name][1].get("attn_logit_softcapping")}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_cut(name: str):
    kind, changes = WINDOWS[name]
    with torch.no_grad():
        cut, whole = alone(build(kind, changes)), alone(build(kind, changes | {"sliding_window": 64}))
    assert (cut - whole).abs().max() > FAULT


def test_the_softcap_changes_scores():
    kind, changes = FLASH["gemma2, window, softcap"]
    with torch.no_grad():
        capped, plain = alone(build(kind, changes)), alone(build(kind, changes | {"attn_logit_softcapping": None}))
    assert (capped - plain).abs().max() > FAULT


@pytest.mark.parametrize("name", MODELS)
def test_a_siblings_key_shows(name: str):
    """A branch that sees the first token of a sibling's response in place of its own differs, and no other row does."""
    model, plan = build(*MODELS[name]), shared_plan("sdpa")
    own, sibling = (sum(len(row) for row in rows()[:number]) + PROMPTS[0] for number in (0, 5))
    assert torch.cat(rows())[own] != torch.cat(rows())[sibling]
    changed = plan.keys == plan.expanded[own]
    assert int(changed.sum()) == 1
    with torch.no_grad():
        right = shared(model, plan)
        plan.keys = torch.where(changed, plan.expanded[sibling], plan.keys)
        differs = (shared(model, plan) - right).abs()
    answer = ROWS[0][1]
    assert differs[:answer].max() > FAULT
    assert differs[answer:].max() <= LOG_PROB


def test_gradients_of_a_prompts_keys_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256: the sum of more branches than that would not grow."""
    branches = 300
    assert branches == torch.tensor(branches, dtype=torch.bfloat16)
    one_by_one = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(branches):
        one_by_one += 1
    assert one_by_one == 256
    index = torch.tensor([0, *[1] * branches, 2])
    keys = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    found: torch.Tensor = _Gathered.apply(keys, index)
    assert torch.equal(found, keys[:, :, index])
    found.backward(torch.ones_like(found))
    assert keys.grad is not None
    assert keys.grad.dtype == torch.bfloat16
    assert torch.equal(keys.grad, torch.tensor([1, branches, 1])[:, None].expand_as(keys).to(torch.bfloat16))
    (stock,) = torch.autograd.grad(keys.index_select(2, index).sum(), keys)
    assert (stock[:, :, 1] != branches).all(), "the sum of torch's index_select"
