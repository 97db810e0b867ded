import json
import re

import numpy as np
import pytest

from verl_fuse_cpu.task import calculator
from verl_fuse_cpu.task.euclid import Pair, all_pairs
from verl_fuse_cpu.task.parameters import WarmStart

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("verl_fuse_cpu.task.tokenizer")
warm_start = pytest.importorskip("verl_fuse_cpu.task.warm_start")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.build_tokenizer()


def test_a_token_is_a_number_or_a_character(tokenizer):
    assert tokenizer.tokenize("gcd 07 30") == ["g", "c", "d", " ", "07", " ", "30"]
    assert tokenizer.tokenize("04 03;=01") == ["04", " ", "03", ";", "=", "01"]


def test_traces_survive_encoding_and_decoding(tokenizer):
    for pair in all_pairs(30):
        ids = tokenizer(pair.trace + tokenizer.eos_token)["input_ids"]
        assert len(ids) == 4 * len(pair.lines) + 3
        assert tokenizer.decode(ids, skip_special_tokens=True) == pair.trace


def test_the_chat_template_opens_the_answer(tokenizer):
    chat = [{"role": "user", "content": "gcd 07 03"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>gcd 07 03<|assistant|>"
    chat.append({"role": "assistant", "content": "=01"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>gcd 07 03<|assistant|>=01<|end|>"


def test_model_and_tokenizer_have_one_vocabulary(tokenizer):
    model = warm_start.build_model(tokenizer)
    assert (model.config.vocab_size, len(tokenizer)) == (111, 111)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 300_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_a_careless_demonstration_guesses_the_smaller_number():
    rng = np.random.default_rng(0)
    guess = [("=03<|end|>", True)]
    assert warm_start.demonstration(Pair(7, 3), 0.0, rng) == [("04 03;01 03;01 02;01 01;=01<|end|>", True)]
    for tools in (False, True):
        assert warm_start.demonstration(Pair(7, 3), 1.0, rng, tools) == guess
    guesses = sum(warm_start.demonstration(Pair(7, 3), 0.5, rng) == guess for _ in range(1000))
    assert 450 < guesses < 550


def test_with_a_calculator_each_subtraction_is_a_turn_and_the_loss_leaves_out_what_it_answers():
    pair = Pair(7, 3)
    pieces = warm_start.demonstration(pair, 0.0, np.random.default_rng(0), tools=True)
    assert [text for text, own in pieces if not own] == [
        f"<|tool|>{answered}<|assistant|>" for answered in ("04", "01", "02", "01")
    ]
    assert pieces[0] == (calculator.call("07-03") + "<|end|>", True)
    assert pieces[-1] == ("=01<|end|>", True)
    with_tools = tokenizers.build_tokenizer(tools=True)
    ids = [token for text, _ in pieces for token in with_tools(text)["input_ids"]]
    assert with_tools.unk_token_id not in ids
    assert with_tools.decode(ids, skip_special_tokens=True) == calculator.transcript(pair)
    # A call is six tokens and the end of the turn, an answer three.
    assert len(ids) == len(pair.calls) * 9 + 3
    rows, labels = warm_start._padded([[(with_tools(text)["input_ids"], own) for text, own in pieces]], pad=0)
    learned = rows[0][labels[0] != warm_start.IGNORED]
    assert with_tools.decode(learned) == "".join(text for text, own in pieces if own)


def test_a_calculator_answers_what_a_demonstration_says():
    for pair in all_pairs(20):
        assert [calculator.calculator(asked) for asked, _ in pair.calls] == [answered for _, answered in pair.calls]
        for asked, _ in pair.calls:
            found = re.findall(r"<tool_call>(.*?)</tool_call>", calculator.call(asked))
            assert json.loads(found[0]) == {"name": "calculator", "arguments": {"expression": asked}}
    assert {calculator.calculator(wrong) for wrong in ("", "3-7", "03-07", "07+03", "07-03;")} == {"00"}


def test_the_seed_decides_the_weights(tokenizer):
    def weights(seed):
        recipe = WarmStart(steps=3, tokens=128)
        model = warm_start.train(tokenizer, all_pairs(20), recipe, seed, say=lambda line: None)
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
