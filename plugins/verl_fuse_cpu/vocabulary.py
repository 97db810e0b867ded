"""Read the sizes of a local model's vocabulary and of its tokenizer from their files, without transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.spec.files import load_json


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The number of rows of the model's embedding, and of ids that the tokenizer can produce (`len(tokenizer)`)."""

    model: int
    tokenizer: int


def read_vocabulary(model_path: Any, tokenizer_path: Any = None) -> Vocabulary | None:
    """Return both sizes; None where the model or the tokenizer is not local or not in the usual files (config.json,
    tokenizer.json).

    Raises FuseError for a file that cannot be read as JSON.
    """
    if not isinstance(model_path, str):
        return None
    model = Path(model_path).expanduser()
    tokenizer = Path(tokenizer_path).expanduser() if isinstance(tokenizer_path, str) else model
    config_file, tokenizer_file = model / "config.json", tokenizer / "tokenizer.json"
    if not (config_file.is_file() and tokenizer_file.is_file()):
        return None
    size = load_json(config_file).get("vocab_size")
    data = load_json(tokenizer_file)
    vocabulary = data.get("model", {}).get("vocab")
    if not isinstance(size, int) or not isinstance(vocabulary, dict | list):
        return None
    # Word and BPE models map tokens to ids; unigram models list them in order of id.
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    ids.update(token["id"] for token in data.get("added_tokens", []))
    return Vocabulary(size, len(ids))
