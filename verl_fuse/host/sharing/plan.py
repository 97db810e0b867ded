"""Lays the rows of a micro-batch out so that each prompt is there once: the packed tokens that are computed, and the
keys that each of them sees.

A group's rows become its prompt without the last token, then a branch per row: the prompt's last token and the
response. A branch begins with the token before the response, so that verl's labels (the next token) and outputs (one
per token) hold in each computed row as they do in a whole one.

Invariants (tests/unit/host/test_shared_plan.py):
- a row of one sample is cut into prompt and branch, too: attention reads the same segments of a row whatever its
  neighbours in a micro-batch;
- each token of each row has one computed token, of the same value at the same position;
- a branch sees its prompt and itself, and no other branch.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

# Marks the rows of one prompt in a batch: a number for each row.
GROUP_FIELD = "verl_fuse_prompt"
# Tells how many times the limit of a micro-batch its whole rows may have: the memory of gathered keys and values.
KEYS_FIELD = "verl_fuse_keys"


class SharedPlan:
    """The layout of rows with these `lengths`, the last `answers` tokens of which are responses; rows of the same
    number in `groups` have the same prompt. `kernel`: the model's own attention, by its name in transformers.

    A plain class: FSDP copies tensors inside of tuples and dataclasses that a module gets, and leaves other objects as
    they are.
    """

    def __init__(
        self, lengths: Sequence[int], answers: Sequence[int], groups: Sequence[int], device: torch.device, kernel: str
    ) -> None:
        starts = list(accumulate(lengths, initial=0))
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        kept: list[torch.Tensor] = []
        segments: list[tuple[int, int, int, int]] = []
        # Computed rows: tokens of each, tokens of its response, the row that it is taken from.
        self.lengths, self.answers, self.sources = list[int](), list[int](), list[int]()
        expanded = torch.empty(starts[-1], dtype=torch.long)
        done = 0

        def compute(row: int, first: int, end: int, answer: int, prompt: tuple[int, int]) -> None:
            nonlocal done
            kept.append(torch.arange(starts[row] + first, starts[row] + end))
            segments.append((done, done + end - first, *prompt))
            self.lengths.append(end - first)
            self.answers.append(answer)
            self.sources.append(row)
            expanded[starts[row] + first : starts[row] + end] = torch.arange(done, done + end - first)
            done += end - first

        for rows in members.values():
            shared = shared_tokens(lengths[rows[0]], answers[rows[0]])
            prompt = (done, done + shared)
            if shared:
                compute(rows[0], 0, shared, 0, (done, done))
            for row in rows:
                expanded[starts[row] : starts[row] + shared] = torch.arange(*prompt)
                compute(row, shared, lengths[row], answers[row], prompt)
        # Computed token -> token of the packed rows, and the other way round.
        self.kept, self.expanded = torch.cat(kept).to(device), expanded.to(device)
        # (first and end of the queries, first and end of their prompt).
        self.segments, self.kernel = segments, kernel
        keys = [torch.cat([torch.arange(p, q), torch.arange(first, end)]) for first, end, p, q in segments]
        self.keys = torch.cat(keys).to(device)
        queries = [end - first for first, end, _, _ in segments]
        seen = [len(one) for one in keys]
        self.query_starts, self.key_starts = (
            torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32, device=device)
            for sizes in (queries, seen)
        )
        self.most_queries, self.most_keys = max(queries), max(seen)


def shared_tokens(length: int, answer: int) -> int:
    """Return the tokens of a row that it shares with others of its prompt."""
    return max(length - answer - 1, 0)


def prompt_groups(data: Any) -> torch.Tensor:
    """Return a number for each row of a batch, the same one for rows whose prompts, positions and temperatures are the
    same."""
    rows: dict[tuple[object, ...], int] = {}
    ends = data["input_ids"].offsets().tolist()
    answers = data["responses"].offsets().diff().tolist()
    tokens, positions = (data[name].values().cpu().numpy() for name in ("input_ids", "position_ids"))
    given = data["temperature"]
    temperatures = given.tolist() if isinstance(given, torch.Tensor) and given.dim() else [0.0] * len(answers)
    numbers = []
    for start, end, answer, temperature in zip(ends[:-1], ends[1:], answers, temperatures, strict=True):
        prompt = slice(start, max(end - answer, start))
        key = (tokens[prompt].tobytes(), positions[prompt].tobytes(), temperature)
        numbers.append(rows.setdefault(key, len(rows)))
    return torch.tensor(numbers)


def row_prompts(data: Any) -> list[tuple[int, int]] | None:
    """Return each row's prompt and the tokens that its rows share; None where the engine shares none."""
    if GROUP_FIELD not in data:
        return None
    lengths, answers = (data[name].offsets().diff().tolist() for name in ("input_ids", "responses"))
    return [
        (number, shared_tokens(length, answer))
        for number, length, answer in zip(data[GROUP_FIELD].tolist(), lengths, answers, strict=True)
    ]
