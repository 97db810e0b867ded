"""Values of rules keep the run's limits: literal values, and every value against verl's own conditions."""

import pytest
from omegaconf import OmegaConf
from tuned_run import ACTOR, MODEL, REFERENCE, ROLLOUT, run

from verl_fuse.spec.composed import getter
from verl_fuse.tune.setting import Rule
from verl_fuse.tune.table import BY_KEY

LAYOUT = f"{ACTOR}.megatron"
MEGATRON = {f"{ACTOR}.strategy": "megatron", "critic.strategy": "megatron", f"{REFERENCE}.strategy": "megatron"}


def tried(key: str, changes: dict | None = None) -> tuple:
    rule = BY_KEY[key].values
    assert isinstance(rule, Rule)
    return rule.tried(getter(OmegaConf.create(run(changes))), key)


def test_a_budget_begins_at_the_longest_sequence_and_doubles_up_to_a_ranks_rows():
    # 16 prompts of 4 samples on 8 ranks are 8 rows; a pass of all 32 prompts is 16.
    assert tried(f"{ACTOR}.ppo_max_token_len_per_gpu") == (501, 1002, 2004, 4008, 8016)
    assert tried(f"{ROLLOUT}.log_prob_max_token_len_per_gpu") == (501, 1002, 2004, 4008, 8016, 16032)
    assert tried("critic.ppo_infer_max_token_len_per_gpu") == (501, 1002, 2004, 4008, 8016)


@pytest.mark.parametrize("shared", [2, 4])
def test_ranks_that_share_a_sequence_hold_it_together(shared: int):
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    budgets = tried(f"{ACTOR}.ppo_max_token_len_per_gpu", {key: shared})
    assert budgets[0] * shared >= 501 > (budgets[0] - 1) * shared
    assert (
        tried(f"{ACTOR}.ppo_max_token_len_per_gpu", MEGATRON | {f"{LAYOUT}.context_parallel_size": shared})[0]
        == (budgets[0])
    )


def test_a_micro_batch_divides_the_rows_of_a_rank():
    assert tried(f"{ACTOR}.ppo_micro_batch_size_per_gpu") == (1, 2, 4, 8)
    assert tried(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu") == (1, 2, 4, 8, 16)
    odd = {f"{ACTOR}.ppo_mini_batch_size": 12, f"{ROLLOUT}.n": 4}
    assert tried(f"{ACTOR}.ppo_micro_batch_size_per_gpu", odd) == (1, 2, 3, 6)


def test_nothing_is_tried_where_ranks_do_not_divide_the_rows():
    assert tried(f"{ACTOR}.ppo_micro_batch_size_per_gpu", {f"{ACTOR}.ppo_mini_batch_size": 3}) == ()
    assert tried(f"{ACTOR}.ppo_max_token_len_per_gpu", {"data.max_prompt_length": None}) == ()


def test_requests_go_up_to_all_of_a_replica_within_the_tokens_of_a_pass():
    # Four replicas share 128 samples.
    assert tried(f"{ROLLOUT}.max_num_seqs") == (8, 16, 32)
    assert tried(f"{ROLLOUT}.max_num_seqs", {f"{ROLLOUT}.max_num_batched_tokens": 16}) == (8, 16)
    assert tried(f"{ROLLOUT}.max_num_seqs", {"data.train_batch_size": 33}) == (8, 16, 32, 64)
    assert tried(f"{ROLLOUT}.max_num_batched_tokens", {f"{ROLLOUT}.max_num_seqs": 4096})[0] == 4096


@pytest.mark.parametrize(("longest", "least"), [(None, 2048), (4096, 4096), (4097, 8192)])
def test_a_pass_holds_a_sequence_where_prompts_are_computed_whole(longest: int | None, least: int):
    key, changes = f"{ROLLOUT}.max_num_batched_tokens", {f"{ROLLOUT}.max_model_len": longest}
    assert tried(key, changes | {f"{ROLLOUT}.enable_chunked_prefill": False})[0] == least
    assert tried(key, changes | {f"{ROLLOUT}.enable_chunked_prefill": True})[0] == 2048
    # 2100 tokens of prompt and response.
    long = {"data.max_response_length": 2000, f"{ROLLOUT}.enable_chunked_prefill": False}
    assert tried(key, long)[0] == 4096


def test_replicas_divide_nodes_and_devices():
    assert tried(f"{ROLLOUT}.tensor_model_parallel_size") == (1, 2, 4)
    assert tried(f"{ROLLOUT}.tensor_model_parallel_size", {f"{ROLLOUT}.data_parallel_size": 4}) == (1, 2)
    assert tried(f"{ROLLOUT}.expert_parallel_size", {f"{ROLLOUT}.data_parallel_size": 2}) == (1, 4)


def test_ranks_divide_the_mini_batches_of_all_models_that_they_train():
    assert tried(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size") == (1, 2, 4)
    # 6 prompts of 1 sample: 8 ranks and 4 ranks do not divide them, 2 do.
    few = {f"{ACTOR}.ppo_mini_batch_size": 6, f"{ROLLOUT}.n": 1}
    assert tried(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", few) == (4,)
    assert tried(f"{LAYOUT}.tensor_model_parallel_size", MEGATRON) == (1, 2, 4)
    assert tried(f"{LAYOUT}.pipeline_model_parallel_size", MEGATRON) == (1, 2, 4, 8)
    assert tried(f"{LAYOUT}.pipeline_model_parallel_size", MEGATRON | {f"{LAYOUT}.context_parallel_size": 4}) == (1, 2)
    critic = MEGATRON | {"critic.ppo_mini_batch_size": 1, "algorithm.adv_estimator": "gae"}
    assert tried(f"{LAYOUT}.tensor_model_parallel_size", critic) == (2, 4)


def test_shard_groups_divide_all_devices():
    assert tried(f"{ACTOR}.fsdp_config.fsdp_size") == (-1, 1, 2, 4)


def test_stages_alone_have_chunks():
    assert tried(f"{LAYOUT}.virtual_pipeline_model_parallel_size") == (None,)
    assert tried(f"{LAYOUT}.virtual_pipeline_model_parallel_size", {f"{LAYOUT}.pipeline_model_parallel_size": 2}) == (
        *(None, 2, 4),
    )


def test_rows_are_padded_or_cut_by_count_only_where_verl_runs_that():
    dynamic, size = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    assert tried(dynamic) == tried(dynamic, {size: 4}) == (True,)
    assert tried(dynamic, {size: 4, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4}) == (True, False)
    assert tried(f"{MODEL}.use_remove_padding") == (True, False)
    assert tried(f"{MODEL}.use_remove_padding", {f"{ACTOR}.ulysses_sequence_parallel_size": 2}) == (True,)


def test_captured_sizes_end_at_the_requests():
    assert tried(f"{ROLLOUT}.cudagraph_capture_sizes", {f"{ROLLOUT}.max_num_seqs": 8}) == (None, [1, 2, 4, 8])
