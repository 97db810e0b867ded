"""Vocabulary sizes read from a model's files."""

import json
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_cpu.vocabulary import Vocabulary, read_vocabulary


def write(folder: Path, config: dict, tokenizer: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def test_added_tokens_count_once(tmp_path):
    # <pad> is in the model's own vocabulary and listed as added; <eos> is only added.
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1, "<pad>": 2}}, "added_tokens": [{"id": 2}, {"id": 3}]}
    assert read_vocabulary(write(tmp_path, {"vocab_size": 5}, tokenizer)) == Vocabulary(model=5, tokenizer=4)


def test_unigram_models_list_their_tokens(tmp_path):
    tokenizer = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}
    assert read_vocabulary(write(tmp_path, {"vocab_size": 2}, tokenizer)) == Vocabulary(model=2, tokenizer=2)


def test_the_tokenizer_may_live_elsewhere(tmp_path):
    model = write(tmp_path / "model", {"vocab_size": 2}, {"model": {"vocab": {"a": 0}}})
    tokenizer = write(tmp_path / "tokenizer", {}, {"model": {"vocab": {"a": 0, "b": 1}}})
    assert read_vocabulary(model, tokenizer) == Vocabulary(model=2, tokenizer=2)


@pytest.mark.parametrize("path", [None, "Qwen/Qwen2.5-0.5B-Instruct", "~/no/such/model"])
def test_a_model_that_is_not_here_is_not_judged(path):
    assert read_vocabulary(path) is None


def test_an_unreadable_file_is_named(tmp_path):
    model = write(tmp_path, {"vocab_size": 2}, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FuseError, match=r"config\.json: cannot be read"):
        read_vocabulary(model)
