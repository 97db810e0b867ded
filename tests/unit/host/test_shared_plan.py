"""How rows with the same prompt are laid out: the invariants in the docstring of the module."""

import random
from itertools import accumulate, product

import pytest

pytest.importorskip("verl")
import torch

from verl_fuse.host.sharing.plan import SharedPlan, prompt_groups, row_prompts, shared_tokens


def plan(lengths, answers, groups) -> SharedPlan:
    """Rows of a group have the same prompt."""
    shared = map(shared_tokens, lengths, answers)
    return SharedPlan(lengths, answers, list(zip(groups, shared, strict=True)), torch.device("cpu"), "sdpa")


def rows(draw: random.Random):
    """Lengths, answers, groups and tokens of rows: groups of one to five rows, mixed, with prompts of 1 token and
    more."""
    groups = [group for group in range(4) for _ in range(draw.randint(1, 5))]
    draw.shuffle(groups)
    prompts = [[draw.randint(1, 99) for _ in range(draw.choice([1, 2, 9]))] for _ in range(4)]
    answers = [[draw.randint(1, 99) for _ in range(draw.randint(1, 6))] for _ in groups]
    tokens = [prompts[group] + answer for group, answer in zip(groups, answers, strict=True)]
    return [len(row) for row in tokens], [len(answer) for answer in answers], groups, tokens


@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_computed_once_at_its_place_and_sees_its_own_row_alone(seed):
    lengths, answers, groups, tokens = rows(random.Random(seed))
    found = plan(lengths, answers, groups)
    packed = torch.tensor([token for row in tokens for token in row])
    places = torch.cat([torch.arange(length) for length in lengths])
    computed, at = packed[found.kept], places[found.kept]
    assert torch.equal(computed[found.expanded], packed)
    assert torch.equal(at[found.expanded], places)
    shared = [length - answer - 1 for length, answer in zip(lengths, answers, strict=True)]
    once = {group: number for group, number in zip(groups, shared, strict=True)}
    assert sum(found.lengths) == len(computed) == sum(lengths) - sum(shared) + sum(once.values())
    # What a query sees is its row up to itself.
    for row, end in enumerate(accumulate(lengths)):
        branch = int(found.expanded[end - 1])
        (number,) = [n for n, (first, last, _, _) in enumerate(found.segments) if first <= branch < last]
        keys = found.keys[found.key_starts[number] : found.key_starts[number + 1]]
        assert computed[keys].tolist() == tokens[row]
        assert at[keys].tolist() == list(range(lengths[row]))
    assert found.query_starts.diff().tolist() == [last - first for first, last, _, _ in found.segments]
    assert (found.most_queries, found.most_keys) == (
        int(found.query_starts.diff().max()),
        int(found.key_starts.diff().max()),
    )


def test_labels_of_computed_rows_are_those_of_whole_ones():
    lengths, answers, groups, tokens = rows(random.Random(1))
    found = plan(lengths, answers, groups)
    packed = torch.tensor([token for row in tokens for token in row])
    labels = torch.roll(packed[found.kept], -1)[found.expanded]
    ends = list(accumulate(lengths))
    for end, answer in zip(ends, answers, strict=True):
        assert labels[end - answer - 1 : end - 1].tolist() == packed[end - answer : end].tolist()
    assert [answer for answer in found.answers if answer] == [
        answers[row] for row, answer in zip(found.sources, found.answers, strict=True) if answer
    ]


def test_a_row_alone_is_cut_as_in_a_group():
    alone, together = plan([7], [3], [0]), plan([7, 6], [3, 2], [0, 0])
    assert alone.lengths == [3, 4]
    assert together.lengths == [3, 4, 3]
    assert plan([3], [2], [0]).lengths == [3], "a prompt of one token is in the branch"


def batch(prompts, answers, temperature=None):
    def nested(rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "input_ids": nested(rows),
        "position_ids": nested([list(range(len(row))) for row in rows]),
        "responses": nested(answers),
        "temperature": 1.0 if temperature is None else torch.tensor(temperature),
    }


def test_rows_are_of_one_prompt_by_its_tokens_and_their_temperature():
    prompts, answers = [[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3]], [[7], [3, 7], [8, 8], [9]]
    assert prompt_groups(batch(prompts, answers)).tolist() == [[0, 2], [1, 1], [0, 2], [0, 2]]
    cooler = batch(prompts, answers, [1.0, 1.0, 0.5, 1.0])
    assert prompt_groups(cooler).tolist() == [[0, 2], [1, 1], [2, 2], [0, 2]]
    moved = batch(prompts, answers)
    moved["position_ids"] = torch.nested.as_nested_tensor(
        [torch.arange(first, first + length) for first, length in ((0, 4), (0, 4), (1, 5), (0, 4))],
        layout=torch.jagged,
    )
    assert prompt_groups(moved).tolist() == [[0, 2], [1, 1], [2, 2], [0, 2]]


def conversations(draw: random.Random):
    """Prompts of the turns of two or three conversations about one question, in any order; a later turn's prompt begins
    with the turn before, its answer, or with nothing of it (a context that was cut)."""
    question = [draw.randint(1, 9) for _ in range(draw.choice([2, 7]))]
    found = []
    for _ in range(draw.randint(2, 3)):
        history = list(question)
        for _ in range(draw.randint(1, 3)):
            answer = [draw.randint(1, 9) for _ in range(draw.randint(1, 9))]
            found.append((list(history), answer))
            history = [*history, *answer, 0] if draw.random() < 0.8 else [*history[1:], 1]
    draw.shuffle(found)
    return map(list, zip(*found, strict=True))


def most_saved(prompts):
    """Try every choice of a beginning for each row: the tokens that the best of them leaves out."""
    choices = [[other for other in prompts if prompt[: len(other)] == other] for prompt in prompts]
    best = 0
    for chosen in product(*choices):
        rows = {tuple(one): sum(one == other for other in chosen) for one in chosen}
        best = max(best, sum((number - 1) * (len(one) - 1) for one, number in rows.items()))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_turns_of_a_conversation_share_the_prompt_that_they_begin_with(seed):
    draw = random.Random(seed)
    prompts, answers = conversations(draw)
    data = batch(prompts, answers)
    found = prompt_groups(data)
    members = {}
    for row, (number, shared) in enumerate(found.tolist()):
        members.setdefault(number, []).append((prompts[row][:shared], shared))
    assert all(group.count(group[0]) == len(group) for group in members.values())
    saved = sum((len(group) - 1) * group[0][1] for group in members.values())
    assert saved == most_saved(prompts)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    laid_out = SharedPlan(list(map(len, rows)), list(map(len, answers)), found.tolist(), torch.device("cpu"), "sdpa")
    packed = torch.tensor([token for row in rows for token in row])
    assert len(laid_out.kept) == len(packed) - saved
    assert torch.equal(packed[laid_out.kept][laid_out.expanded], packed)
    labels = torch.roll(packed[laid_out.kept], -1)[laid_out.expanded]
    for end, answer in zip(accumulate(map(len, rows)), answers, strict=True):
        assert labels[end - len(answer) - 1 : end - 1].tolist() == answer


def test_rows_tell_what_they_share():
    data = batch([[1, 2, 3], [4]], [[7], [3, 7]])
    assert row_prompts(data) is None
    data["verl_fuse_prompt"] = prompt_groups(data)
    assert row_prompts(data) == [(0, 2), (1, 0)]
    assert shared_tokens(5, 5) == 0, "a row without a prompt"
