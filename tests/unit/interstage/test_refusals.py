"""Settings that the copies of a slice cannot have are refused before anything is started; settings of models without a
copy are not."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.composed import getter
from verl_fuse_interstage.refusals import refusals

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# PPO with a KL penalty: old log-probs, reference and values.
PPO = {
    "trainer.v1.trainer_mode": "fuse",
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "fuse.interstage.enabled": True,
    "fuse.interstage.layout": "slices",
    f"{ROLLOUT}.tensor_model_parallel_size": 4,
}
# GRPO without one: old log-probs alone.
GRPO = PPO | {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False}
BYPASS = {"algorithm.rollout_correction.bypass_mode": True}


def refused(settings: dict[str, Any]) -> dict[str, str]:
    """Return key -> the text of its refusal."""
    config = OmegaConf.create({})
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    return {refusal.key: str(refusal) for refusal in refusals(getter(config))}


def ulysses(actor: int, ref: int, critic: int) -> dict[str, Any]:
    sizes = {f"{ACTOR}.fsdp_config": actor, f"{REF}.fsdp_config": ref, f"{CRITIC}.fsdp": critic}
    return {f"{block}.ulysses_sequence_parallel_size": size for block, size in sizes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ulysses(2, 2, 2),
        {f"{ACTOR}.fsdp_config.fsdp_size": 2, f"{CRITIC}.fsdp.fsdp_size": 8, f"{REF}.fsdp_config.fsdp_size": -1},
        # verl does not quantize a reference, wherever it runs.
        {f"{REF}.fsdp_config.qat.enable": True},
        # Adapters of FSDP2.
        {f"{MODEL}.lora_rank": 8, f"{ACTOR}.strategy": "fsdp2"},
        {"critic.model.lora_rank": 8, "critic.strategy": "fsdp2"},
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_adapter_path": "a"},
        # With them no reference is built beside the policy, which is needed for the reference then.
        {f"{MODEL}.lora_rank": 8} | ulysses(2, 3, 2),
        {f"{MODEL}.lora_rank": 8} | BYPASS | ulysses(2, 3, 2),
        # verl's critic reads the size of its engine alone.
        {f"{CRITIC}.ulysses_sequence_parallel_size": 3},
        # The host of a CPU has no device's memory to give back.
        {f"{ROLLOUT}.free_cache_engine": False, "trainer.device": "cpu"},
        {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": True},
        {f"{engine}.megatron.virtual_pipeline_model_parallel_size": 1 for engine in (ACTOR, REF, CRITIC)},
        {"fuse.interstage.migration_threshold": 1.0},
    ],
)
def test_what_every_copy_can_have_is_accepted(changes):
    assert refused(PPO | changes) == {}


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"critic.model.lora_rank": 8, "critic.strategy": "fsdp"}, "critic.strategy", "='fsdp': fuse.interstage.layout=slices needs fsdp2 with critic.model.lora_rank=8"),
        ({f"{MODEL}.lora_rank": 8, f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy", f"='fsdp': fuse.interstage.layout=slices needs fsdp2 with {MODEL}.lora_rank=8"),
        ({f"{MODEL}.lora.rank": 8}, f"{MODEL}.lora.rank", f"=8: fuse.interstage.layout=slices needs {MODEL}.lora_rank > 0"),
        ({f"{MODEL}.lora_adapter_path": "a"}, f"{MODEL}.lora_adapter_path", f"='a': fuse.interstage.layout=slices needs {MODEL}.lora_rank > 0"),
        ({f"{ACTOR}.fsdp_config.qat.enable": True}, f"{ACTOR}.fsdp_config.qat.enable", "=true: fuse.interstage.layout=slices needs false"),
        ({"critic.fsdp.qat.enable": True}, "critic.fsdp.qat.enable", "=true: fuse.interstage.layout=slices needs false"),
        (ulysses(1, 1, 2), "critic.fsdp.ulysses_sequence_parallel_size", f"=2: fuse.interstage.layout=slices needs the size of {ACTOR}"),
        ({f"{REF}.ulysses_sequence_parallel_size": 2}, f"{REF}.ulysses_sequence_parallel_size", "(1): one call on a slice computes all models"),
        (ulysses(3, 3, 3), f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "=3: fuse.interstage.layout=slices needs a divisor of the 4 devices"),
        (ulysses(8, 8, 8), f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "=8: fuse.interstage.layout=slices needs a divisor of the 4 devices"),
        ({"critic.fsdp.fsdp_size": 3}, "critic.fsdp.fsdp_size", "=3: fuse.interstage.layout=slices needs -1, or a divisor of the 4 devices"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_what_a_copy_cannot_have_is_refused_by_key_value_and_what_is_allowed(changes, key, said):
    assert said in refused(PPO | changes)[key]
    assert refused(PPO | changes | {"fuse.interstage.layout": "shared"}) == {}, "the training workers have it"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{ROLLOUT}.free_cache_engine": False, "trainer.device": "cuda"}, f"{ROLLOUT}.free_cache_engine"),
        ({"fuse.interstage.migration_threshold": 1.01}, "fuse.interstage.migration_threshold"),
        ({"reward.reward_model.enable": True}, "reward.reward_model.enable_resource_pool"),
        *(({key: 2}, key) for key in (f"{e}.megatron.virtual_pipeline_model_parallel_size" for e in (ACTOR, REF))),
    ],
)
def test_what_streaming_and_migration_cannot_have_is_refused_by_key(changes, key):
    assert refused(PPO | changes).keys() == {key}


def test_a_connector_is_told_its_weights_in_trainer_mode_fuse_alone():
    connector = {f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config": {"kv_role": "kv_both"}}
    assert refused({"trainer.v1.trainer_mode": "sync"} | connector) == {}
    assert refused({"trainer.v1.trainer_mode": "fuse"} | connector).keys() == connector.keys()


@pytest.mark.parametrize(
    ("frees", "named"),
    [
        ({"fuse.interstage.enabled": True, "fuse.interstage.migration_threshold": 0.2}, "migration_threshold"),
        ({"fuse.elastic.enabled": True, "fuse.elastic.release": True}, "fuse.elastic.release"),
        ({"fuse.elastic.enabled": True, "fuse.elastic.release": False}, None),
    ],
)
def test_a_store_that_empties_with_one_replica_is_refused_where_replicas_are_freed(frees, named):
    key = f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config"
    told = {"fuse.interstage.kv_transfer_params": {"cache": "{weights}"}, "trainer.v1.trainer_mode": "fuse"}
    found = refused({key: {"kv_connector": "MooncakeStoreConnector"}} | told | frees)
    assert (key in found) is (named is not None)
    assert named is None or f"{named}: vLLM empties the whole Mooncake store" in found[key]


def test_keys_of_a_model_that_has_no_copy_are_not_read():
    assert refused(GRPO | {"critic.fsdp.qat.enable": True} | ulysses(2, 3, 3)) == {}
    assert refused(PPO | BYPASS | {f"{ACTOR}.fsdp_config.qat.enable": True} | ulysses(3, 2, 2)) == {}
    key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    assert key in refused(PPO | BYPASS | {f"{MODEL}.lora_rank": 8} | ulysses(3, 2, 2)), "the policy is the reference"


def tensor(actor: int, ref: int, critic: int) -> dict[str, Any]:
    sizes = {ACTOR: actor, REF: ref, CRITIC: critic}
    return {f"{engine}.megatron.tensor_model_parallel_size": size for engine, size in sizes.items()}


MEGATRON = PPO | {f"{engine}.strategy": "megatron" for engine in (ACTOR, REF, CRITIC)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        tensor(2, 2, 2) | {"critic.megatron.pipeline_model_parallel_size": 4},
        {f"{ACTOR}.megatron.expert_model_parallel_size": 2, f"{ACTOR}.megatron.param_offload": True},
        # Of engines that Megatron's are not.
        ulysses(3, 2, 1),
        {f"{ACTOR}.megatron.router_replay.mode": "disabled"},
    ],
)
def test_what_a_megatron_copy_can_have_is_accepted(changes):
    assert refused(MEGATRON | changes) == {}


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        (tensor(8, 8, 8), f"{ACTOR}.megatron.tensor_model_parallel_size", "=8: fuse.interstage.layout=slices needs a divisor of the 4 devices"),
        (tensor(2, 2, 4), "critic.megatron.tensor_model_parallel_size", f"=4: fuse.interstage.layout=slices needs the size of {ACTOR}"),
        ({"critic.strategy": "fsdp2"}, "critic.strategy", "='fsdp2': fuse.interstage.layout=slices needs megatron, as the actor"),
        ({f"{ACTOR}.strategy": "fsdp2"}, "critic.strategy", "='megatron': fuse.interstage.layout=slices needs fsdp or fsdp2, as the actor"),
        ({f"{ACTOR}.strategy": "veomni"}, f"{ACTOR}.strategy", "='veomni': fuse.interstage.layout=slices needs fsdp or fsdp2"),
        ({f"{REF}.megatron.context_parallel_size": 2}, f"{REF}.megatron.context_parallel_size", "=2: fuse.interstage.layout=slices needs 1"),
        ({"critic.megatron.use_megatron_fsdp": True}, "critic.megatron.use_megatron_fsdp", "=true: fuse.interstage.layout=slices needs false"),
        ({f"{ACTOR}.megatron.router_replay.mode": "R2"}, f"{ACTOR}.megatron.router_replay.mode", "='R2': fuse.interstage.layout=slices needs disabled"),
        ({f"{MODEL}.lora.rank": 8}, f"{MODEL}.lora.rank", "=8: fuse.interstage.layout=slices needs 0 with megatron"),
        ({"critic.model.lora_rank": 8}, "critic.model.lora_rank", "=8: fuse.interstage.layout=slices needs 0 with megatron"),
        ({f"{MODEL}.mtp.enable": True}, f"{MODEL}.mtp.enable", "=true: fuse.interstage.layout=slices needs false"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_what_a_megatron_copy_cannot_have_is_refused_by_key_value_and_what_is_allowed(changes, key, said):
    assert said in refused(MEGATRON | changes)[key]


def test_megatron_keys_of_a_model_that_has_no_copy_are_not_read():
    grpo = MEGATRON | {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False}
    assert refused(grpo | {"critic.megatron.context_parallel_size": 2, f"{REF}.megatron.qat.enable": True}) == {}
