"""How updates are placed on ranks: the invariants in the docstring of the module."""

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from transfer_queue import KVBatchMeta

from verl_fuse.host.record.step import TrainerPart
from verl_fuse_update.balance import (
    BalancedUpdates,
    Cut,
    Prompts,
    balanced,
    cut_of,
    in_order,
    prompts_of,
    share_saved,
    work_of,
)


def parts(rows, ranks, mini_batch):
    """[mini-batch][rank] -> rows, as verl cuts a batch: a contiguous share for each rank, of which each
    mini-batch takes the next rows."""
    share, part = len(rows) // ranks, mini_batch // ranks
    return [
        [rows[rank * share + start : rank * share + start + part] for rank in range(ranks)]
        for start in range(0, share, part)
    ]


def slowest(work, order, cut: Cut):
    """The slowest ranks' work, turn by turn, counted by hand."""
    total = 0
    for ranks in parts(order, cut.ranks, cut.mini_batch):
        turn = cut.micro_batch or len(ranks[0])
        for start in range(0, len(ranks[0]), turn):
            rows = [[work[row] for row in rank[start : start + turn]] for rank in ranks]
            total += max(turn * max(one) if cut.padded and cut.micro_batch else sum(one) for one in rows)
    return total


def test_work_moves_to_the_rank_that_has_none():
    work = [5, 7, 6, 8, 0, 0, 0, 0]
    order = balanced(work, Cut(2, 8))
    assert [sum(work[row] for row in rank) for rank in parts(order, 2, 8)[0]] == [13, 13]


CASES = [(None, False), (2, False), (2, True), (1, False), (1, True), (4, True)]


@pytest.mark.parametrize(("micro_batch", "padded"), CASES)
@pytest.mark.parametrize("seed", range(8))
def test_mini_batches_keep_their_rows_and_the_slowest_ranks_have_no_more_work(seed, micro_batch, padded):
    draw = random.Random(seed)
    ranks, mini_batches, each = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([4, 8])
    cut = Cut(ranks, ranks * each, micro_batch, padded)
    work = [
        draw.choice([0, 0, draw.randint(50, 100), draw.randint(50, 1000)]) for _ in range(ranks * each * mini_batches)
    ]
    order = balanced(work, cut)
    stock = list(range(len(work)))
    for one, other in zip(parts(stock, ranks, cut.mini_batch), parts(order, ranks, cut.mini_batch), strict=True):
        assert sorted(chain(*one)) == sorted(chain(*other))
    assert slowest(work, order, cut) == cut.amount(work, order) <= cut.amount(work, stock)
    assert order == stock or cut.amount(work, order) < cut.amount(work, stock)
    assert share_saved(work, order, cut) == pytest.approx(1 - slowest(work, order, cut) / slowest(work, stock, cut))


def test_by_tokens_work_is_even_by_less_than_the_largest_row():
    draw = random.Random(1)
    work = [draw.randint(50, 100) for _ in range(48)]
    for ranks in parts(balanced(work, Cut(4, 16)), 4, 16):
        loads = [sum(work[row] for row in rank) for rank in ranks]
        assert max(loads) - min(loads) < 100


def test_fixed_micro_batches_have_even_work_and_no_higher_peak():
    """The longest rows do not share a micro-batch, whose memory would grow."""
    work = [9, 1, 8, 2, 7, 3, 6, 4]
    order = balanced([9, 8, 7, 6, 1, 2, 3, 4], Cut(2, 8, 2))
    sizes = [sum([9, 8, 7, 6, 1, 2, 3, 4][row] for row in order[start : start + 2]) for start in range(0, 8, 2)]
    assert sizes == [10, 10, 10, 10]
    assert balanced(work, Cut(2, 8, 2)) == list(range(8)), "as even already: verl's order stays"


def test_padded_micro_batches_have_rows_of_about_one_length_in_the_same_turn():
    work = [9, 1, 8, 2, 7, 3, 6, 4]
    order = balanced(work, Cut(2, 8, 2, padded=True))
    first, second = ([[work[row] for row in order[start : start + 2]] for start in begin] for begin in ((0, 4), (2, 6)))
    assert first == [[9, 8], [7, 6]]
    assert second == [[4, 3], [2, 1]]


def test_shares_of_mini_batches_are_of_the_same_size():
    """Rows, not work, are what verl cuts by."""
    order = balanced([100, 1, 1, 1, 1, 1], Cut(2, 6))
    assert sorted(order[:3] + order[3:]) == list(range(6))


@pytest.mark.parametrize(("ranks", "mini_batch", "rows"), [(4, 10, 20), (4, 2, 4), (4, 6, 12), (3, 4, 12)])
def test_a_mini_batch_that_ranks_do_not_divide_is_left_to_verl_s_assertion(ranks, mini_batch, rows):
    """`rows` is what verl fills the batch up to: the least common multiple."""
    work = list(range(1, rows + 1))
    assert balanced(work, Cut(ranks, mini_batch)) == list(range(rows))
    assert share_saved(work, range(rows), Cut(ranks, mini_batch)) == 0.0


@pytest.mark.parametrize("cut", [Cut(2, 8, 3), Cut(2, 6)])
def test_a_batch_that_verl_cannot_cut_is_left_to_verl_s_assertion(cut):
    assert balanced([9, 8, 7, 6, 1, 2, 3, 4], cut) == list(range(8))


class Group:
    """A worker group of two data-parallel ranks, for the dispatch over the mesh that verl asks for."""

    def __init__(self, mesh: str) -> None:
        self._dispatch_info = {mesh: [0, 1]}


def trainer(**changes: Any) -> Any:
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"n": 2},
                "model": {"use_remove_padding": True},
                "actor": {"ppo_mini_batch_size": 2, "use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": 1},
            },
            "critic": {"ppo_mini_batch_size": 4},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return SimpleNamespace(config=config, actor_rollout_wg=Group("actor"), critic_wg=Group("train"))


ACTOR = "actor_rollout_ref.actor"


def test_cuts_are_those_of_each_model():
    assert cut_of(trainer(), "actor") == Cut(2, 4)
    assert cut_of(trainer(), "critic") == Cut(2, 8)
    fixed = trainer(**{f"{ACTOR}.use_dynamic_bsz": False, "actor_rollout_ref.model.use_remove_padding": False})
    assert cut_of(fixed, "actor") == Cut(2, 4, 1, padded=True)


def batch(lengths: list[int]) -> KVBatchMeta:
    keys = [f"row {row}" for row in range(len(lengths))]
    tags = [{"seq_len": length} for length in lengths]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})


def test_the_update_gets_rows_in_another_order_and_the_batch_that_goes_on_is_verls():
    whole, seen = batch([90, 80, 10, 20, 10, 20, 30, 40]), []

    def stock(given: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        seen.append(given)
        given.extra_info["epochs"] = 3
        metrics["actor/loss"] = 1.0
        return given

    part, metrics = BalancedUpdates(trainer(), ["actor"]), {}
    assert part.method("update_actor", stock)(whole, metrics) is whole
    (given,) = seen
    assert whole.keys == [f"row {row}" for row in range(8)]
    assert whole.extra_info == {"temperature": 1.0}
    assert given.keys != whole.keys
    assert sorted(given.keys[0:2] + given.keys[4:6]) == ["row 0", "row 1", "row 4", "row 5"]
    assert [tag["seq_len"] for tag in given.tags] == [
        dict(zip(whole.keys, [90, 80, 10, 20, 10, 20, 30, 40], strict=True))[key] for key in given.keys
    ]
    work = work_of(whole)
    order = [whole.keys.index(key) for key in given.keys]
    assert metrics == {"actor/loss": 1.0, "fuse/actor_balance_saved": share_saved(work, order, Cut(2, 4))}
    assert metrics["fuse/actor_balance_saved"] > 0.2


@pytest.mark.parametrize(
    ("stage", "models"), [("update_critic", ["actor"]), ("update_actor", ["critic"]), ("ref", ["actor", "critic"])]
)
def test_other_stages_are_verls(stage, models):
    def stock(given, metrics):
        raise AssertionError

    assert BalancedUpdates(trainer(), models).method(stage, stock) is stock
    assert TrainerPart().method(stage, stock) is stock


def test_a_batch_in_another_order_has_extra_info_of_its_own():
    whole = batch([1, 2])
    other = in_order(whole, [1, 0])
    other.extra_info["temperature"] = 0.5
    assert (other.keys, whole.keys, whole.extra_info) == (["row 1", "row 0"], ["row 0", "row 1"], {"temperature": 1.0})


def prompts_on(ranks, prompts: Prompts):
    """The prompts that ranks compute, all together: one for each rank that has a sample of it."""
    return sum(len({prompts.groups[row] for row in rank}) for mini in ranks for rank in mini)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("micro_batch", [None, 2, 4])
def test_samples_of_a_prompt_are_on_one_rank_where_ranks_compute_it_once(seed, micro_batch):
    draw = random.Random(seed)
    ranks, mini_batches = draw.choice([1, 2, 4]), draw.choice([1, 2])
    cut = Cut(ranks, ranks * 8, micro_batch)
    rows = ranks * 8 * mini_batches
    groups = [row // 4 for row in range(rows)]
    draw.shuffle(groups)
    shared = {group: draw.randint(500, 900) for group in set(groups)}
    prompts = Prompts(groups, [shared[group] for group in groups])
    work = [shared[group] + draw.choice([10, 50, 300]) for group in groups]
    order = balanced(work, cut, prompts)
    stock = list(range(rows))
    for one, other in zip(parts(stock, ranks, cut.mini_batch), parts(order, ranks, cut.mini_batch), strict=True):
        assert sorted(chain(*one)) == sorted(chain(*other))
        assert {len(rank) for rank in other} == {8}
    assert cut.amount(work, order, prompts) <= cut.amount(work, stock, prompts)
    assert cut.amount(work, order, prompts) <= cut.amount(work, balanced(work, cut), prompts)
    assert prompts_on(parts(order, ranks, cut.mini_batch), prompts) <= prompts_on(
        parts(stock, ranks, cut.mini_batch), prompts
    )


def test_whole_groups_go_where_most_room_is_and_a_group_that_is_left_out_takes_its_prompt_along():
    # Two groups of four and one of eight on two ranks of eight.
    groups = [*"aaaabbbb", *"cccccccc"]
    prompts, work = Prompts(groups, [100] * 16), [110] * 16
    found = parts(balanced(work, Cut(2, 16), prompts), 2, 16)[0]
    assert {frozenset(groups[row] for row in rank) for rank in found} == {frozenset("ab"), frozenset("c")}
    # No sample of c has a gradient: its rows fill what the others leave, and its prompt is on no rank.
    work = [110] * 8 + [0] * 8
    order = balanced(work, Cut(2, 16), prompts)
    assert prompts.work(work, order[:8]) == prompts.work(work, order[8:]) == 100 + 4 * 10
    assert prompts.work(work, [8, 9]) == 0


def test_a_group_that_no_rank_can_take_is_on_as_few_as_can():
    # Groups of six and two on two ranks of four, in verl's order two on each.
    groups = [*"aaabaaab"]
    prompts, work = Prompts(groups, [100] * 8), [120 if group == "a" else 105 for group in groups]
    found = parts(balanced(work, Cut(2, 8), prompts), 2, 8)[0]
    assert sorted("".join(sorted({groups[row] for row in rank})) for rank in found) == ["a", "ab"]


def test_prompts_are_those_of_the_keys_and_padding_has_its_own():
    """A later turn goes with the first one's prompt, unless its own is shorter (b) or the first turn is not there."""
    keys = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_0_1", "b_0_2", "c_0_1", "x_0_0", "x_1_0"]
    lengths = [5, 8, 5, 6, 5, 6, 7, 127, 127]
    tags = [
        {"seq_len": length + 4, "prompt_len": length, "is_padding": key[0] == "x"}
        for key, length in zip(keys, lengths, strict=True)
    ]
    found = prompts_of(KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={}))
    a, b = ("a", 5), ("b", 6)
    assert found.groups == [a, a, a, b, "b_0_1", b, "c_0_1", "x_0_0", "x_1_0"]
    shared = [4, 4, 4, 5, 4, 5, 6, 126, 126]
    assert found.shared == [24576 * tokens + tokens**2 for tokens in shared]
