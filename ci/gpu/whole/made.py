"""What a comparison needs and no network brings: a model of random weights whose responses have a geometric length,
prompts of random letters, and a reward that is equal for all samples of four prompts in ten.

`python -m ci.gpu.whole.made FOLDER --size 1.5b --ends 0.002 --prompts 64 --tokens 200 [--device cuda]`

The end-of-sequence token has about the same chance at each place: one dimension of the residual stream holds a
constant, which no layer writes, and the embedding of that token has as much of it as gives the wanted chance.
"""

import argparse
import json
import random
import string
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "tiny": {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = {"1.5b": 151936, "0.5b": 151936, "tiny": 512}
END, CONSTANT = 2, 0.05
ROOT = Path(__file__).resolve().parents[3]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **unused) -> float:
    """verl's reward function: 1 for prompts whose number ends in 0 to 3, else whether the text's length is odd."""
    return 1.0 if int(ground_truth) < 4 else float(len(solution_str) % 2)


def make_prompts(path: Path, prompts: int, letters: int) -> None:
    """Write prompts of random letters, a token each."""
    import pandas

    numbers = random.Random(0)
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": "".join(numbers.choices(string.ascii_lowercase, k=letters))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(index % 10)},
            "extra_info": {"index": index},
        }
        for index in range(prompts)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def make_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of single bytes, and of whole words that only a model says, with the marks that verl wants."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<pad>", "<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = {word: number for number, word in enumerate(marks)}
    words |= {f"w{number}": number for number in range(len(marks), vocabulary)}
    whole = Tokenizer(models.BPE(words, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def make_model(folder: Path, size: str, ends: float, device: str) -> dict[str, float]:
    """Write the model in bfloat16 and return the chance of the end that its weights give."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocabulary = VOCABULARY[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=0,
        **SIZES[size],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        words = model.model.embed_tokens.weight
        words[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)[0] = 0
            layer.mlp.down_proj.weight.mul_(0.3)[0] = 0
        seen: dict[str, torch.Tensor] = {}
        hook = model.model.norm.register_forward_hook(lambda module, given, out: seen.update(last=out.float()))
        ids = torch.randint(3, vocabulary, (4, 256), device=device)
        logits = model(input_ids=ids).logits.float()
        hook.remove()
        others = torch.logsumexp(torch.cat([logits[..., :END], logits[..., END + 1 :]], -1), -1)
        own = (seen["last"][..., 1:] * words[END, 1:].float()).sum(-1)
        low, high = CONSTANT, 1e4
        for _ in range(60):
            middle = (low + high) / 2
            chance = torch.sigmoid(own + middle * seen["last"][..., 0] - others).mean().item()
            low, high = (middle, high) if chance < ends else (low, middle)
        words[END, 0] = low
        chances = torch.softmax(model(input_ids=ids).logits.float(), -1)[..., END]
    model.save_pretrained(folder, safe_serialization=True)
    return {"wanted": ends, "mean": chances.mean().item(), "first 50": chances[:, :50].mean().item()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.whole.made", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--ends", type=float, default=0.002, help="chance that a token is the last one")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of a prompt")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    model = options.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    make_prompts(options.folder / "prompts.parquet", options.prompts, options.tokens)
    make_tokenizer(model, VOCABULARY[options.size])
    chances = make_model(model, options.size, options.ends, options.device)
    print(json.dumps({"made": options.size, "chance of the end": chances, "seconds": time.monotonic() - begun}))


if __name__ == "__main__":
    main()
