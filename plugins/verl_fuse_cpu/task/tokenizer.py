"""Makes a tiny tokenizer with a chat template: a token is one two-digit number, one character or one of five special
tokens. With a calculator there are four more: the minus, the opening and the end of a call, and the special token of
the tool's turn."""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fuse_cpu.task.calculator import CALL_END, CALL_START
from verl_fuse_cpu.task.euclid import LARGEST_ALLOWED

CHARACTERS = " ;=gcd"
PAD, END, USER, ASSISTANT, UNKNOWN_CHARACTER = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
TOOL = "<|tool|>"

# One token opens a turn. Prompts end in <|assistant|>, responses in <|end|>.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(tools: bool = False) -> PreTrainedTokenizerFast:
    special = [PAD, END, USER, ASSISTANT, UNKNOWN_CHARACTER]
    numbers = [f"{number:02d}" for number in range(LARGEST_ALLOWED + 1)]
    calls = [TOOL, "-", CALL_START, CALL_END] if tools else []
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS, *numbers, *calls])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_CHARACTER))
    parts = [*(re.escape(token) for token in calls[2:]), r"\d\d", "."]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(parts)), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN_CHARACTER,
        additional_special_tokens=[USER, ASSISTANT, *calls[:1]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
