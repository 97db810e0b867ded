"""Lays the rows of a micro-batch out so that each prompt is there once: the packed tokens that are computed, and the
keys that each of them sees.

A group's rows become its prompt without the last token, then a branch per row: the prompt's last token and the
response. A branch begins with the token before the response, or earlier, so that verl's labels (the next token) and
outputs (one per token) hold in each computed row as they do in a whole one.

Rows of one conversation have different prompts: a later turn's begins with an earlier one's. Such a row joins the group
of that prompt, and the rest of its own prompt is in its branch.

Invariants (tests/unit/host/test_shared_plan.py):
- a row of one sample is cut into prompt and branch, too: attention reads the same segments of a row whatever its
  neighbours in a micro-batch, unless its prompt begins with another row's;
- rows whose prompts begin with others' share as many tokens as groups of one beginning can;
- each token of each row has one computed token, of the same value at the same position;
- a branch sees its prompt and itself, and no other branch.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import torch

# Of each row: its group's number, and the tokens that rows of this number share.
Prompts = Sequence[tuple[int, int]]

# Marks the rows of one prompt in a batch: for each row the group's number, and the tokens that its rows share.
GROUP_FIELD = "verl_fuse_prompt"
# Tells how many times the limit of a micro-batch its whole rows may have: the memory of gathered keys and values.
KEYS_FIELD = "verl_fuse_keys"


class SharedPlan:
    """The layout of rows with these `lengths`, the last `answers` tokens of which are responses; `prompts` tells the
    group of each row, and the tokens that its rows share. `kernel`: the model's own attention, by its name in
    transformers.

    A plain class: FSDP copies tensors inside of tuples and dataclasses that a module gets, and leaves other objects as
    they are.
    """

    def __init__(
        self, lengths: Sequence[int], answers: Sequence[int], prompts: Prompts, device: torch.device, kernel: str
    ) -> None:
        starts = list(accumulate(lengths, initial=0))
        members: dict[int, list[int]] = {}
        for row, (group, _) in enumerate(prompts):
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
            shared = prompts[rows[0]][1]
            prompt = (done, done + shared)
            if shared:
                compute(rows[0], 0, shared, 0, (done, done))
            for row in rows:
                expanded[starts[row] : starts[row] + shared] = torch.arange(*prompt)
                compute(row, shared, lengths[row], answers[row], prompt)
        # Computed token -> token of the packed rows, and the other way round.
        self.kept, self.expanded = torch.cat(kept).to(device), expanded.to(device)
        # Calls of attention that have read it.
        self.used = 0
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
    """Return the tokens of a row that it shares with others of its own prompt."""
    return max(length - answer - 1, 0)


def prompt_groups(data: Any) -> torch.Tensor:
    """Return (rows, 2) for a batch: the number of each row's group, and the tokens that the group's rows share. Rows of
    a group have the same temperature, and the same tokens at the same positions as far as they share them."""
    members: dict[tuple[float, bytes], list[int]] = {}
    ends = data["input_ids"].offsets().tolist()
    lengths, answers = (data[name].offsets().diff().tolist() for name in ("input_ids", "responses"))
    tokens, positions = (data[name].values().cpu().numpy() for name in ("input_ids", "position_ids"))
    given = data["temperature"]
    temperatures = given.tolist() if isinstance(given, torch.Tensor) and given.dim() else [0.0] * len(answers)
    # A token and its position are neighbours, so that the bytes of a prompt's beginning begin its bytes.
    pairs = np.stack((tokens, positions), axis=1)
    for row, (start, length, answer) in enumerate(zip(ends[:-1], lengths, answers, strict=True)):
        prompt = pairs[start : start + max(length - answer, 0)].tobytes()
        members.setdefault((temperatures[row], prompt), []).append(row)
    prompts = sorted(members)
    rows = [members[prompt] for prompt in prompts]
    shared = [shared_tokens(lengths[each[0]], answers[each[0]]) for each in rows]
    found = torch.empty(len(answers), 2, dtype=torch.long)
    for each, anchor in zip(rows, _anchors(prompts, list(map(len, rows)), shared), strict=True):
        found[each] = torch.tensor([rows[anchor][0], shared[anchor]])
    return found


def _anchors(prompts: Sequence[tuple[float, bytes]], rows: Sequence[int], shared: Sequence[int]) -> list[int]:
    """Return for each of the sorted `prompts` the one in whose group its rows are, itself or one that it begins with,
    so that most tokens are shared: each row but the first of a group saves the `shared` tokens of the group's
    prompt."""
    # The prompts that each one begins with, the shortest first.
    above: list[list[int]] = []
    chain: list[int] = []
    for number, (temperature, prompt) in enumerate(prompts):
        while chain and not (prompts[chain[-1]][0] == temperature and prompt.startswith(prompts[chain[-1]][1])):
            chain.pop()
        above.append(list(chain))
        chain.append(number)
    # By place in that list: what a prompt's rows, and those of the prompts that begin with it, save at most where
    # `above[place]` is the longest that has a group; and whether its rows are then a group of their own.
    saved: list[list[int]] = [[0] * len(each) for each in above]
    apart: list[list[bool]] = [[] for _ in above]
    # Sums of `saved` over the prompts just below; the last place is its own group.
    below: list[list[int]] = [[0] * (len(each) + 1) for each in above]
    for number in reversed(range(len(prompts))):
        *joined, alone = below[number]
        alone += (rows[number] - 1) * shared[number]
        joined = [rest + rows[number] * shared[one] for rest, one in zip(joined, above[number], strict=True)]
        apart[number] = [alone >= other for other in joined]
        saved[number] = [max(alone, other) for other in joined]
        if above[number]:
            parent = below[above[number][-1]]
            parent[:] = map(add, parent, saved[number])
    anchors: list[int] = []
    for number, each in enumerate(above):
        # The longest prompt above that has a group is that of the one just above.
        place = each.index(anchors[each[-1]]) if each else None
        anchors.append(number if place is None or apart[number][place] else each[place])
    return anchors


def row_prompts(data: Any) -> list[tuple[int, int]] | None:
    """Return each row's group and the tokens that its rows share; None where the engine shares none."""
    if GROUP_FIELD not in data:
        return None
    return [(number, shared) for number, shared in data[GROUP_FIELD].tolist()]
