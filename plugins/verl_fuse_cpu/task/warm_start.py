"""Makes a tiny causal language model, and the supervised start that gives reinforcement learning something to
reinforce.

The demonstrations are of mixed quality on purpose: a share of them guesses the smaller number without any working. The
model learns the arithmetic and imitates the guessing, so accuracy has room to rise, and responses grow longer while
accuracy rises.

Invariants (tests/integration/test_recipes_compose.py, tests/unit/task/test_warm_start.py):
- the model's vocabulary is as large as the tokenizer;
- the same seed gives the same weights.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl_fuse_cpu.task.calculator import call
from verl_fuse_cpu.task.euclid import Pair, response
from verl_fuse_cpu.task.parameters import WarmStart
from verl_fuse_cpu.task.tokenizer import ASSISTANT, END, PAD, TOOL

IGNORED = -100


def build_model(tokenizer: PreTrainedTokenizerFast, layers: int = 3) -> LlamaForCausalLM:
    """Return a Llama with 0.47 M parameters (at three layers) in fp32, random weights from torch's current seed.

    Qwen2 is not used: for that model type transformers 5 ignores the saved tokenizer and builds Qwen2's own.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=_id(tokenizer, END),
            pad_token_id=_id(tokenizer, PAD),
        )
    )


def demonstration(pair: Pair, careless: float, rng: np.random.Generator, tools: bool = False) -> list[tuple[str, bool]]:
    """Return the right trace, or with probability `careless` a guess without working: the smaller number. The result is
    pieces of text, each with True if the piece is the model's own; pieces of a tool have False."""
    if rng.random() < careless:
        return [(response((), min(pair.a, pair.b)) + END, True)]
    if not tools:
        return [(pair.trace + END, True)]
    turns = [[(call(asked) + END, True), (f"{TOOL}{answered}{ASSISTANT}", False)] for asked, answered in pair.calls]
    return [*chain.from_iterable(turns), (response((), pair.answer) + END, True)]


def train(
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[Pair],
    recipe: WarmStart,
    seed: int,
    say: Callable[[str], None] = print,
    layers: int = 3,
    tools: bool = False,
) -> LlamaForCausalLM:
    """Train a new model on demonstrations for `pairs`; the loss counts the model's own tokens only."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = build_model(tokenizer, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, recipe.steps, pct_start=0.1)
    batches = _batches(tokenizer, pairs, recipe, rng, tools)
    started = time.monotonic()
    for step in range(recipe.steps):
        ids, labels = next(batches)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            say(
                f"warm start: step {step + 1}/{recipe.steps}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} "
                "s"
            )
    return model.eval()


def _batches(
    tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], recipe: WarmStart, rng: np.random.Generator, tools: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless (ids, labels), each (batch, tokens) and right-padded: causal attention never looks at the
    padding."""
    weights = np.array([len(pair.lines) for pair in pairs], dtype=float) ** -recipe.exponent
    while True:
        examples = []
        for i in rng.choice(len(pairs), size=256, p=weights / weights.sum()):
            chat = [{"role": "user", "content": pairs[i].prompt}]
            prompt = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            pieces = [(prompt, False), *demonstration(pairs[i], recipe.careless, rng, tools)]
            examples.append([(tokenizer(text)["input_ids"], own) for text, own in pieces])
        examples.sort(key=_tokens)
        groups, group = [], []
        for example in examples:
            if group and (len(group) + 1) * _tokens(example) > recipe.tokens:
                groups.append(group)
                group = []
            group.append(example)
        for i in rng.permutation(len(groups)):
            yield _padded(groups[i], _id(tokenizer, PAD))


# An example is pieces of token ids, each with True if the piece is the model's own.
Example = list[tuple[list[int], bool]]


def _tokens(example: Example) -> int:
    return sum(len(ids) for ids, _ in example)


def _padded(group: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(_tokens, group))
    ids = torch.full((len(group), longest), pad)
    labels = torch.full((len(group), longest), IGNORED)
    for row, example in enumerate(group):
        end = 0
        for piece, own in example:
            begin, end = end, end + len(piece)
            ids[row, begin:end] = torch.tensor(piece)
            if own:
                labels[row, begin:end] = ids[row, begin:end]
    return ids, labels


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return tokenizer.get_vocab()[token]
