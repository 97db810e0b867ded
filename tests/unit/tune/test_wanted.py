"""What is tried on request, and what is refused with its reason."""

import pytest
from omegaconf import OmegaConf
from tuned_run import ACTOR, ROLLOUT, run

from verl_fuse.errors import FuseError
from verl_fuse.tune.wanted import check, columns, wanted

PACKED, BUDGET = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
ULYSSES, SHARDS = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.fsdp_size"
SIZES = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}
PADDED = {PACKED: False, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False, **SIZES}


def keys_of(*keys: str, allow: tuple[str, ...] = (), changes: dict | None = None) -> set[str]:
    return {each.setting.key for each in wanted(OmegaConf.create(run(changes)), keys, allow)}


def problem(*keys: str, allow: tuple[str, ...] = (), changes: dict | None = None) -> str:
    with pytest.raises(FuseError) as refused:
        check(OmegaConf.create(run(changes)), keys, allow)
    return str(refused.value)


def test_what_cuts_mini_batches_anew_or_ends_resuming_is_tried_where_it_is_allowed():
    assert not {ULYSSES, SHARDS} & keys_of()
    assert {ULYSSES, SHARDS} & keys_of(allow=("ends_resume",)) == {SHARDS}
    assert {ULYSSES, SHARDS} <= keys_of(allow=("ends_resume", "cuts_mini_batches"))


def test_keys_that_are_named_are_tried_alone():
    assert keys_of(BUDGET, "reward.num_workers") == {BUDGET, "reward.num_workers"}
    check(OmegaConf.create(run()), (BUDGET,), ())
    # After a change of the other key it has a use.
    assert keys_of(PACKED, BUDGET, changes=PADDED) == {PACKED}
    check(OmegaConf.create(run(PADDED)), (PACKED, BUDGET), ())


@pytest.mark.parametrize(
    ("key", "changes", "said"),
    [
        (f"{ROLLOUT}.max_num_seq", {}, f"there is no such key (did you mean '{ROLLOUT}.max_num_seqs'?)"),
        ("data.train_batch_size", {}, "the samples of a step or of an update depend on it"),
        ("critic.use_dynamic_bsz", {}, "the critic is always packed, by one key alone"),
        (SHARDS, {}, "needs --allow ends_resume"),
        (ULYSSES, {}, "needs --allow cuts_mini_batches"),
        (BUDGET, PADDED, f"{PACKED}=false: needs true"),
        ("critic.strategy", {}, "there is no critic"),
        ("critic.strategy", {"algorithm.adv_estimator": "gae"}, "needs --allow ends_resume"),
    ],
)
def test_a_key_that_cannot_be_tried_is_refused_with_its_reason(key: str, changes: dict, said: str):
    assert problem(key, changes=changes).startswith(f"--keys {key}: {said}")


def test_all_problems_are_said_at_once():
    assert problem("data.seed", "zzz", allow=("rounds",)).startswith("3 problems:\n  - --allow rounds: allowed: cuts_")


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_asynchronous_modes_are_refused(mode: str):
    said = problem(changes={"trainer.v1.trainer_mode": mode})
    assert said.startswith(f"trainer.v1.trainer_mode={mode}: needs fuse or sync")


def test_a_run_that_leaves_nothing_to_try_is_refused():
    assert problem(changes={"trainer.use_v1": False}).startswith("trainer.use_v1=false: needs true")


def test_a_key_costs_what_its_setting_costs_and_so_does_one_that_is_set_with_it():
    assert columns(ULYSSES) == columns(f"{ACTOR}.ulysses_sequence_parallel_size") == ("rounds", "cuts_mini_batches")
    assert columns("reward.num_workers") == columns("data.seed") == ()


@pytest.mark.parametrize("key", [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"])
def test_a_base_whose_budget_does_not_hold_the_longest_sequence_is_refused(key: str):
    with pytest.raises(FuseError, match=rf"{key}=500: needs 501 or more: a prompt and a response may have so many"):
        check(OmegaConf.create(run({key: 500})), (), ())
    check(OmegaConf.create(run({key: 501})), (), ())
    # Ranks that share a sequence have half of it each.
    check(OmegaConf.create(run({key: 500, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2})), (), ())
