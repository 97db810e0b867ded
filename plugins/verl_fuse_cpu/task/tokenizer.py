"""A tiny tokenizer with a chat template: a token is one two-digit number, one character or one of five special tokens."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fuse_cpu.task.euclid import LARGEST_ALLOWED

CHARACTERS = " ;=gcd"
PAD, END, USER, ASSISTANT, UNKNOWN_CHARACTER = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"

# One token opens a turn. Prompts end in <|assistant|>, responses in <|end|>.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    special = [PAD, END, USER, ASSISTANT, UNKNOWN_CHARACTER]
    numbers = [f"{number:02d}" for number in range(LARGEST_ALLOWED + 1)]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS, *numbers])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_CHARACTER))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d\d|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN_CHARACTER,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
