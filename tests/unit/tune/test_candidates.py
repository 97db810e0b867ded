"""What a configuration leaves to try, what each value sets, and the reason why any other key is not tried."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tuned_run import ACTOR, MODEL, REFERENCE, ROLLOUT, run

from verl_fuse.tune.candidates import Candidate, candidates, not_tried
from verl_fuse.tune.table import BY_KEY, TABLE

FSDP, BLOCK = f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron.override_transformer_config"
MEGATRON = {f"{ACTOR}.strategy": "megatron", "critic.strategy": "megatron", f"{REFERENCE}.strategy": "megatron"}
RUNS = (
    {},
    MEGATRON,
    {"algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True},
    {"trainer.device": "cpu"},
    {f"{ROLLOUT}.name": "sglang", f"{ACTOR}.use_dynamic_bsz": False},
)


def of(changes: dict | None = None, **facts: bool) -> dict[str, Candidate]:
    return {each.setting.key: each for each in candidates(run(changes), **facts)}


@pytest.mark.parametrize("changes", RUNS)
def test_each_setting_is_a_candidate_or_has_a_reason(changes: dict):
    found = of(changes)
    for setting in TABLE:
        assert (setting.key in found) == (not_tried(setting.key, run(changes)) is None)
    for each in found.values():
        assert any(value != each.current for value in each.values)
    assert len(found) > 15


def test_no_key_is_in_the_table_twice_and_every_setting_has_its_reason():
    assert len(BY_KEY) == len(TABLE)
    assert all(setting.reason and setting.readers for setting in TABLE)


def test_a_plain_mapping_and_a_composed_configuration_are_read_alike():
    assert candidates(run()) == candidates(OmegaConf.create(run()))


def test_keys_of_fsdp2_alone():
    for key in (f"{FSDP}.offload_policy", f"{FSDP}.use_no_sync_for_gradient_accumulation"):
        assert key in of()
        assert not_tried(key, run({f"{ACTOR}.strategy": "fsdp"})) == f"{ACTOR}.strategy=fsdp: needs fsdp2"


def test_keys_of_one_engine_and_of_one_rollout():
    assert f"{FSDP}.fsdp_size" in of()
    assert f"{FSDP}.fsdp_size" not in of(MEGATRON)
    assert f"{BLOCK}.recompute_granularity" in of(MEGATRON)
    assert f"{ROLLOUT}.max_num_batched_tokens" in of()
    why = not_tried(f"{ROLLOUT}.max_num_batched_tokens", run({f"{ROLLOUT}.name": "sglang"}))
    assert why == f"{ROLLOUT}.name=sglang: needs vllm or trtllm"
    assert not_tried(f"{FSDP}.fsdp_size", run({f"{ACTOR}.strategy": "veomni"})) == (
        f"{ACTOR}.strategy=veomni: needs fsdp or fsdp2"
    )


def test_keys_of_a_critic_and_of_a_reference_want_one():
    key = "critic.ppo_infer_max_token_len_per_gpu"
    assert not_tried(key, run()) == "there is no critic"
    (override,) = of({"algorithm.adv_estimator": "gae"})[key].overrides(4008)
    assert override == f"++{key}=4008"
    budget = f"{REFERENCE}.log_prob_max_token_len_per_gpu"
    reference = {f"{ACTOR}.use_kl_loss": True}
    assert budget in of(reference)
    assert not_tried(budget, run()) == "there is no reference of its own"
    assert not_tried(budget, run(reference | {f"{MODEL}.lora_rank": 8})) == "there is no reference of its own"


def test_adapters_experts_and_accelerators_are_wanted():
    summon, experts = f"{ROLLOUT}.layered_summon", f"{ROLLOUT}.expert_parallel_size"
    lora = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": False, f"{ROLLOUT}.load_format": "safetensors"}
    assert summon in of(lora)
    assert not_tried(summon, run()) == f"{MODEL}.lora_rank=0: needs adapters"
    assert not_tried(summon, run(lora | {f"{ROLLOUT}.load_format": "dummy"})) == (
        f"{ROLLOUT}.load_format=dummy: needs auto or safetensors"
    )
    assert not_tried(experts, run()) == "the model has no experts"
    assert experts in of(experts=True)
    assert not_tried(f"{FSDP}.param_offload", run({"trainer.device": "cpu"})) == (
        "trainer.device=cpu: needs an accelerator"
    )


def test_packed_and_padded_runs_have_other_candidates():
    budget, size = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    assert budget in of()
    assert not_tried(size, run()) == f"{ACTOR}.use_dynamic_bsz=true: needs false"
    padded = of({f"{ACTOR}.use_dynamic_bsz": False, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False})
    assert size in padded
    assert budget not in padded
    # verl asserts that update and log-probs are cut alike.
    assert padded[f"{ACTOR}.use_dynamic_bsz"].overrides(True) == (
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
    )


def test_the_one_value_of_a_rule_is_no_candidate():
    assert not_tried(f"{ACTOR}.use_dynamic_bsz", run()) == (
        f"{ACTOR}.use_dynamic_bsz=true: there is no other value here; needs true, or false where sizes of "
        "micro-batches are set"
    )


def test_a_value_sets_what_must_change_with_it():
    found = of(MEGATRON)
    assert found[f"{BLOCK}.recompute_granularity"].overrides("full") == (
        f"{BLOCK}.recompute_granularity=full",
        f"{BLOCK}.recompute_method=uniform",
        f"{BLOCK}.recompute_num_layers=1",
    )
    assert found[f"{BLOCK}.recompute_granularity"].overrides(None)[1] == f"{BLOCK}.recompute_method=null"
    # One layout for all roles: the first engine of a process divides the ranks.
    size = "megatron.tensor_model_parallel_size=2"
    assert found[f"{ACTOR}.megatron.tensor_model_parallel_size"].overrides(2) == (
        *(f"{role}.{size}" for role in (ACTOR, REFERENCE, "critic")),
    )
    assert of()[f"{ROLLOUT}.cudagraph_capture_sizes"].overrides([1, 2]) == (
        f"++{ROLLOUT}.cudagraph_capture_sizes=[1,2]",
    )


def test_the_columns_say_what_a_layout_costs():
    ulysses, size = BY_KEY[f"{FSDP}.ulysses_sequence_parallel_size"], BY_KEY[f"{FSDP}.fsdp_size"]
    strategy, tensor = BY_KEY[f"{ACTOR}.strategy"], BY_KEY[f"{ACTOR}.megatron.tensor_model_parallel_size"]
    assert [(each.cuts_mini_batches, each.ends_resume) for each in (ulysses, size, strategy, tensor)] == [
        (True, False),
        (False, True),
        (False, True),
        (True, True),
    ]
    # A reference has no checkpoint.
    assert not BY_KEY[f"{REFERENCE}.fsdp_config.fsdp_size"].ends_resume


def test_keys_that_are_not_in_the_table_have_a_reason():
    config = run({f"{MODEL}.tiled_mlp.enabled": False, f"{ROLLOUT}.disable_log_stats": True})
    assert not_tried("critic.use_dynamic_bsz", config) == (
        "the critic is always packed, by one key alone: critic.ppo_infer_max_token_len_per_gpu"
    )
    assert "nothing reads it" in (not_tried(f"{MODEL}.tiled_mlp.enabled", config) or "")
    assert not_tried(f"{ACTOR}.ulysses_sequence_parallel_size", config) == (
        f"it is set with {FSDP}.ulysses_sequence_parallel_size"
    )
    assert not_tried("algorithm.gamma", config) == "the loss, or what it is computed from, depends on it"
    assert not_tried("data.train_batch_size", config) == "the samples of a step or of an update depend on it"
    assert not_tried(f"{ROLLOUT}.disable_log_stats", config) == (
        "not in the table: nobody has shown that other values train the same"
    )


def test_an_unknown_key_is_told_its_nearest():
    assert not_tried(f"{ROLLOUT}.max_num_seq", run()) == (
        f"there is no such key (did you mean '{ROLLOUT}.max_num_seqs'?)"
    )
    assert not_tried("data.trian_batch_size", run()) == "there is no such key (did you mean 'data.train_batch_size'?)"
    assert not_tried("zzz", run()) == "there is no such key"


def test_the_trainer_before_v1_has_no_candidates():
    assert candidates(run({"trainer.use_v1": False})) == ()
    assert candidates(run({"trainer.use_v1": True}))
    assert not_tried(f"{FSDP}.fsdp_size", run({"trainer.use_v1": False})) == (
        "trainer.use_v1=false: the trainer before V1 reads other keys"
    )


def test_the_lines_of_the_readme_run(capsys):
    text = (Path(__file__).resolve().parents[3] / "verl_fuse/tune/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {"config": run({"algorithm.adv_estimator": "gae"})})
    assert "critic.ppo_infer_max_token_len_per_gpu" in capsys.readouterr().out.splitlines()[-1]
