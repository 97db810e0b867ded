"""Convert the model's GGUF file into a folder that transformers, verl and vLLM load: float32 weights, and the tokenizer
as it was published.

transformers reads weights and vocabulary, but not these facts, which are set here:
- a response ends with <|im_end|>, not with <|im_start|>, and padding is a token of its own: verl would take the end's;
- digits are tokens of their own, wherever they stand, and spaces before them stay together, as in training;
- text is decoded as it is, and no text is longer than the model's positions.

Invariants (tests/unit/task/test_smollm2_model.py): the facts above, fixed token ids, and the model's own answer.
"""

from importlib.util import find_spec
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.extras import install

END, PAD = "<|im_end|>", "<|endoftext|>"


def require_gguf() -> None:
    """Raise a FuseError if transformers could not read the file."""
    if find_spec("gguf") is None:
        raise FuseError(f"the model's file needs the package gguf, which is not installed: {install('real')}")


def convert(gguf: Path, folder: Path) -> None:
    """Write weights and tokenizer of `gguf` to `folder`, 538 MB; peaks at 1.3 GB of memory."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
