"""The order of trials: literal guesses, and every pattern against the table."""

from fnmatch import fnmatchcase

import pytest
from tuned_run import ACTOR, REFERENCE, ROLLOUT, run

from verl_fuse.tune.candidates import candidates
from verl_fuse.tune.order import BETTER, ORDER, UNKNOWN, WORSE, changes, guesses, rank
from verl_fuse.tune.setting import FEATURES
from verl_fuse.tune.table import TABLE


@pytest.mark.parametrize("place", range(len(ORDER)), ids=[each.pattern for each in ORDER])
def test_every_pattern_stands_first_for_a_key_of_the_table_and_has_a_reason(place: int):
    keys = [*(setting.key for setting in TABLE), f"{FEATURES}interstage.enabled"]
    assert any(fnmatchcase(key, ORDER[place].pattern) for key in keys)
    assert place in {*map(rank, keys)}
    assert ORDER[place].reason


def test_sizes_of_micro_batches_come_before_packing_and_then_requests():
    named = ("ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")
    keys = [*(f"{ACTOR}.{name}" for name in named), f"{ROLLOUT}.max_num_seqs", f"{ACTOR}.fsdp_config.forward_prefetch"]
    assert sorted(keys, key=rank) == keys
    assert rank(keys[-1]) == len(ORDER)
    assert rank(f"{REFERENCE}.log_prob_use_dynamic_bsz") == rank(keys[2])


@pytest.mark.parametrize("base", [{}, {f"{ACTOR}.strategy": "megatron"}, {"algorithm.adv_estimator": "gae"}])
def test_a_guess_is_another_value_and_each_comes_once(base: dict):
    for candidate in candidates(run(base)):
        found = [value for value, _ in guesses(candidate)]
        assert found
        assert candidate.current not in found
        assert sorted(map(str, found)) == sorted(str(value) for value in candidate.values if value != candidate.current)


def test_the_largest_comes_first_or_the_next_in_the_direction_that_is_expected_to_be_faster():
    base = {f"{ACTOR}.ppo_max_token_len_per_gpu": 1002, f"{ROLLOUT}.max_num_seqs": 256}
    found = {each.setting.key: guesses(each) for each in candidates(run(base))}
    assert found[f"{ACTOR}.ppo_max_token_len_per_gpu"] == (
        *((budget, BETTER) for budget in (8016, 4008, 2004)),
        (501, WORSE),
    )
    # All 32 requests of a replica run at once already.
    assert found[f"{ROLLOUT}.max_num_seqs"] == tuple((requests, WORSE) for requests in (32, 16, 8))
    assert found[f"{ROLLOUT}.tensor_model_parallel_size"] == ((1, BETTER), (4, WORSE))
    assert found[f"{ROLLOUT}.max_num_batched_tokens"] == (
        *((tokens, BETTER) for tokens in (16384, 32768, 65536)),
        *((tokens, WORSE) for tokens in (4096, 2048)),
    )
    assert found["reward.num_workers"] == tuple((workers, UNKNOWN) for workers in (16, 32, 64, 4, 2, 1))
    assert found[f"{ACTOR}.fsdp_config.fsdp_size"] == tuple((size, UNKNOWN) for size in (1, 2, 4))


def test_a_value_that_is_the_better_guess_already_is_left_last():
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    for current, hope in ((True, BETTER), (False, WORSE)):
        found = {each.setting.key: guesses(each) for each in candidates(run({key: current}))}
        assert found[key] == ((not current, hope),)


def test_all_budgets_change_together_before_one_alone():
    budgets = (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    found = [*changes(candidates(run({budgets[0]: 4008, budgets[1]: 4008})))]
    assert [[value for _, value in each.values] for each in found if each.keys == budgets] == [
        [8016, 16032],
        [8016, 8016],
    ]
    first, alone = (
        next(number for number, each in enumerate(found) if each.keys == keys) for keys in (budgets, budgets[:1])
    )
    assert first < alone


def test_keys_of_which_no_value_is_expected_to_be_faster_change_alone():
    found = [*changes(candidates(run({f"{ACTOR}.ppo_max_token_len_per_gpu": 8016})))]
    assert {len(each.keys) for each in found if each.hope != BETTER} == {1}
    assert all(each.values[0][0].setting.key != "reward.num_workers" or len(each.keys) == 1 for each in found)
