"""The order of trials: literal guesses, and every pattern against the table."""

from fnmatch import fnmatchcase

import pytest
from tuned_run import ACTOR, ROLLOUT, run

from verl_fuse.tune.candidates import candidates
from verl_fuse.tune.order import ORDER, guesses, rank
from verl_fuse.tune.table import TABLE


@pytest.mark.parametrize("place", range(len(ORDER)), ids=[each.pattern for each in ORDER])
def test_every_pattern_stands_first_for_a_key_of_the_table_and_has_a_reason(place: int):
    assert any(fnmatchcase(setting.key, ORDER[place].pattern) for setting in TABLE)
    assert place in {rank(setting.key) for setting in TABLE}
    assert ORDER[place].reason


def test_packing_comes_first_then_the_sizes_of_micro_batches_then_requests():
    named = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
    keys = [*(f"{ACTOR}.{name}" for name in named), f"{ROLLOUT}.max_num_seqs", f"{ACTOR}.fsdp_config.forward_prefetch"]
    assert sorted(keys, key=rank) == keys
    assert rank(keys[-1]) == len(ORDER)


@pytest.mark.parametrize("changes", [{}, {f"{ACTOR}.strategy": "megatron"}, {"algorithm.adv_estimator": "gae"}])
def test_a_guess_is_another_value_and_each_comes_once(changes: dict):
    for candidate in candidates(run(changes)):
        found = guesses(candidate)
        assert found
        assert candidate.current not in found
        assert sorted(map(str, found)) == sorted(str(value) for value in candidate.values if value != candidate.current)


def test_the_largest_comes_first_or_the_nearest_larger_one():
    found = {each.setting.key: guesses(each) for each in candidates(run({f"{ACTOR}.ppo_max_token_len_per_gpu": 501}))}
    assert found[f"{ACTOR}.ppo_max_token_len_per_gpu"] == (8016, 4008, 2004, 1002)
    assert found[f"{ROLLOUT}.max_num_seqs"] == (32, 16, 8)
    assert found[f"{ROLLOUT}.max_num_batched_tokens"] == (16384, 32768, 65536, 4096, 2048)
    assert found["reward.num_workers"] == (16, 32, 64, 4, 2, 1)
    assert found[f"{ACTOR}.fsdp_config.fsdp_size"] == (1, 2, 4)
    assert found["actor_rollout_ref.model.enable_gradient_checkpointing"] == (False,)
