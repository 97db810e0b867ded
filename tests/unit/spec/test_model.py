"""Model sizes against the published parameter counts, and refusals."""

import json
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import MODEL_NAMES, model_from, model_named

# Billions of parameters as the model cards state them, biases included.
PUBLISHED = {
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-33b": 32.529,
    "llama-65b": 65.286,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "llama-3.1-405b": 405.854,
    "llama-3.2-1b": 1.236,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616,
    "qwen2.5-72b": 72.706,
    "qwen3-8b": 8.191,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
}
ACTIVE = {"qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0}

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "mlp_only_layers": [],
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_the_published_ones(name: str, billions: float):
    assert model_named(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_active_parameters_are_at_most_all(name: str):
    model = model_named(name)
    assert model.active_parameters <= model.parameters
    assert (model.active_parameters == model.parameters) == (model.experts == 0)


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_parameters_are_the_published_ones(name: str, billions: float):
    assert model_named(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_small_llama_counted_by_hand():
    model = Model.from_hf({**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}, "small")
    assert model.block_parameters == 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert (model.embedding_parameters, model.head_parameters, model.head_width) == (6400, 0, 100)
    assert model.parameters == 2 * model.block_parameters + 6400 + 64
    assert model.kv_values_per_token == 2 * 2 * 2 * 16


def test_a_small_moe_counted_by_hand():
    model = Model("moe", 1, 64, 4, 2, 16, 32, 100, experts=8, experts_per_token=2, shared_intermediate=48)
    attention, norms, router, shared = 64 * 64 * 2 + 64 * 32 * 2, 2 * 64, 64 * 8, 3 * 64 * 48
    assert model.block_parameters == attention + norms + router + shared + 8 * 3 * 64 * 32
    assert model.active_block_parameters == attention + norms + router + shared + 2 * 3 * 64 * 32


def test_missing_kv_heads_means_as_many_as_heads():
    assert Model.from_hf(LLAMA, "small").kv_heads == 4


def test_a_moe_config_is_the_named_model():
    assert Model.from_hf(QWEN3_MOE, "qwen3-30b-a3b") == model_named("qwen3-30b-a3b")
    # As transformers 5 writes it.
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_MOE.items()}
    assert Model.from_hf(renamed, "qwen3-30b-a3b") == model_named("qwen3-30b-a3b")


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_head_is_its_embedding_where_a_checkpoint_does_not_say(kind: str):
    assert Model.from_hf({**LLAMA, "model_type": kind}, "small").tied_embeddings
    assert not Model.from_hf({**LLAMA, "model_type": kind, "tie_word_embeddings": False}, "small").tied_embeddings
    assert not Model.from_hf(LLAMA, "small").tied_embeddings


def test_a_value_model_has_one_output():
    critic = model_named("llama-3.2-1b").as_value_model()
    assert (critic.head_width, critic.head_parameters) == (1, 2048)


def test_a_folder_or_file_is_read(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert Model.read(folder) == Model.read(folder / "config.json") == model_from("small", tmp_path)
    assert Model.read(folder).name == "small"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "deepseek_v3"}, "model_type='deepseek_v3'; known: llama"),
        ({**LLAMA, "model_type": "gpt_oss"}, "model_type='gpt_oss'; known: llama"),
        ({**LLAMA, "hidden_size": None}, "hidden_size=None"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size='64'"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads=3; needs a divisor of heads=4"),
        ({**LLAMA, "num_hidden_layers": 0}, "layers=0"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads=0; needs a whole number > 0"),
        ({**QWEN3_MOE, "num_experts_per_tok": 200}, "experts_per_token=200; needs 1 to experts=128"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "mixes dense and MoE"),
    ],
)
def test_a_wrong_config_is_refused(config: dict, message: str):
    with pytest.raises(FuseError, match=message):
        Model.from_hf(config, "small")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(FuseError, match=r"model 'llama3-8b': unknown; did you mean llama-3-8b"):
        model_named("llama3-8b")


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "not a Hugging Face"), ("{", "not JSON"), (b"\xff", "cannot be read")]
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str | bytes, message: str):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FuseError, match=rf"config\.json: {message}"):
        Model.read(path)
