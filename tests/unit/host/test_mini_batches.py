"""Batches and mini-batches that verl asserts otherwise, at its start or in the first update."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.mini_batches import batch_refusals, mini_batch_refusals
from verl_fuse.host.start.settings import load_settings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MINI, CRITIC_MINI = f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"
MEGATRON = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "dynamic_context_parallel": False,
}


def configuration(**changes):
    """Two nodes of four devices; eight ranks train 6 prompts of 4 samples at a time, the critic 2 prompts."""
    config = OmegaConf.create(
        {
            "trainer": {"nnodes": 2, "n_gpus_per_node": 4, "critic_warmup": 0, "total_training_steps": None},
            "algorithm": {"adv_estimator": "gae"},
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp2",
                    "ppo_mini_batch_size": 6,
                    "ulysses_sequence_parallel_size": 1,
                    "fsdp_config": {"ulysses_sequence_parallel_size": 1},
                    "megatron": MEGATRON,
                },
                "rollout": {"n": 4},
            },
            "critic": {
                "enable": None,
                "strategy": "fsdp",
                "ppo_mini_batch_size": 2,
                "ulysses_sequence_parallel_size": 1,
                "fsdp": {"ulysses_sequence_parallel_size": 1},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(**changes) -> dict[str, str]:
    return {refusal.key: str(refusal) for refusal in mini_batch_refusals(configuration(**changes))}


def test_a_mini_batch_that_ranks_divide_is_not_refused():
    assert refused() == {}


def test_the_refusal_names_the_samples_and_the_ranks():
    assert refused(actor_rollout_ref__actor__ppo_mini_batch_size=5) == {
        MINI: (f"{MINI}=5: times {ROLLOUT}.n=4 are 20 samples: needs a multiple of the 8 data-parallel ranks")
    }


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"critic__ppo_mini_batch_size": 3}, {CRITIC_MINI}),
        ({"critic__ppo_mini_batch_size": 3, "actor_rollout_ref__rollout__n": 1}, {CRITIC_MINI, MINI}),
        ({"trainer__nnodes": 3}, {CRITIC_MINI}),
        # Sequences over ranks leave fewer data-parallel ranks: 20 samples on 4.
        (
            {
                "actor_rollout_ref__actor__ppo_mini_batch_size": 5,
                "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,
            },
            set(),
        ),
        (
            {
                "actor_rollout_ref__actor__ppo_mini_batch_size": 5,
                "actor_rollout_ref__actor__fsdp_config__ulysses_sequence_parallel_size": 2,
            },
            set(),
        ),
        ({"critic__ppo_mini_batch_size": 1, "critic__fsdp__ulysses_sequence_parallel_size": 2}, set()),
        # verl does not read the critic's own key.
        ({"critic__ppo_mini_batch_size": 1, "critic__ulysses_sequence_parallel_size": 2}, {CRITIC_MINI}),
        # tp2 pp2: two data-parallel ranks of eight devices.
        (
            {
                "actor_rollout_ref__actor__strategy": "megatron",
                "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
                "actor_rollout_ref__rollout__n": 1,
                "critic__enable": False,
            },
            set(),
        ),
        (
            {
                "actor_rollout_ref__actor__strategy": "megatron",
                "actor_rollout_ref__actor__ppo_mini_batch_size": 3,
                "actor_rollout_ref__rollout__n": 1,
                "critic__enable": False,
            },
            {MINI},
        ),
    ],
)
def test_ranks_are_those_of_the_role(changes, keys):
    assert set(refused(**changes)) == keys


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref__actor__strategy": "veomni"},
        {
            "actor_rollout_ref__actor__strategy": "megatron",
            "actor_rollout_ref__actor__megatron__dynamic_context_parallel": True,
        },
        # The actor is never trained.
        {"trainer__critic_warmup": 5, "trainer__total_training_steps": 4},
        {"trainer__val_only": True},
        {"trainer__use_v1": False},
        {"trainer__nnodes": None},
    ],
)
def test_what_is_not_trained_or_not_known_is_left_to_verl(changes):
    assert refused(actor_rollout_ref__actor__ppo_mini_batch_size=5, **changes) == {}


def test_an_actor_that_is_trained_in_the_last_step_is_checked():
    changes = {"trainer__critic_warmup": 4, "trainer__total_training_steps": 4}
    assert set(refused(actor_rollout_ref__actor__ppo_mini_batch_size=5, **changes)) == {MINI}


@pytest.mark.parametrize(
    "changes", [{"critic__enable": False}, {"fuse__placement__critic": {"first": 6, "devices": 2}}]
)
def test_a_critic_that_is_absent_or_has_other_devices_is_not_checked_here(changes):
    assert refused(critic__ppo_mini_batch_size=3, **changes) == {}


BATCH = "data.train_batch_size"


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"data__train_batch_size": 12}, {}),
        # verl fills up a batch that its mini-batches do not divide.
        ({"data__train_batch_size": 8}, {}),
        (
            {"data__train_batch_size": 4},
            {MINI: f"{MINI}=6: needs at most {BATCH}=4, or {ACTOR}.use_dynamic_bsz=true"},
        ),
        ({"data__train_batch_size": 4, "actor_rollout_ref__actor__use_dynamic_bsz": True}, {}),
        (
            {"data__train_batch_size": 6, "critic__ppo_mini_batch_size": 8},
            {CRITIC_MINI: f"{CRITIC_MINI}=8: needs at most {BATCH}=6, or critic.use_dynamic_bsz=true"},
        ),
        ({"data__train_batch_size": 6, "critic__ppo_mini_batch_size": 8, "critic__enable": False}, {}),
        (
            {"data__train_batch_size": 7},
            {
                BATCH: (
                    f"{BATCH}=7: times {ROLLOUT}.n=4 are 28 samples: needs a multiple of the 8 devices, or "
                    f"{ACTOR}.use_dynamic_bsz=true"
                )
            },
        ),
        ({"data__train_batch_size": 7, "actor_rollout_ref__actor__use_dynamic_bsz": True}, {}),
        (
            {
                "data__train_batch_size": 8,
                "actor_rollout_ref__actor__strategy": "megatron",
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 3,
            },
            {
                BATCH: (
                    f"{BATCH}=8: times {ROLLOUT}.n=4 are 32 samples: needs a multiple of the 6 samples in a "
                    f"micro-batch of all data-parallel ranks, or {ACTOR}.use_dynamic_bsz=true"
                )
            },
        ),
    ],
)
def test_batches_are_those_that_verl_starts_with(changes, messages):
    assert {found.key: str(found) for found in batch_refusals(configuration(**changes))} == messages


def test_it_is_refused_with_everything_else():
    with pytest.raises(FuseError, match=r"^2 problems:") as error:
        load_settings(
            configuration(actor_rollout_ref__actor__ppo_mini_batch_size=5, fuse__poll_interval=0, critic__enable=False)
        )
    assert f"{MINI}=5: times" in str(error.value)
