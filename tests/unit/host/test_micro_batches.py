"""Micro-batch sizes of the models that a run has, checked before it starts."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.micro_batches import micro_batch_refusals
from verl_fuse.host.start.settings import load_settings

ACTOR = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
ROLLOUT = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
CRITIC = "critic.ppo_micro_batch_size_per_gpu"


def refused(**changes) -> dict[str, object]:
    """Return the refusals of a configuration in which every size is null: key -> value; `changes` by dotted name."""
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
            "actor_rollout_ref": {
                "actor": {"use_dynamic_bsz": False, "use_kl_loss": False, "ppo_micro_batch_size_per_gpu": None},
                "rollout": {"log_prob_micro_batch_size_per_gpu": None},
                "ref": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": None},
                "model": {"lora_rank": 0},
            },
            "critic": {"enable": None, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": None},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return {refusal.key: refusal.value for refusal in micro_batch_refusals(config)}


def test_every_size_that_is_needed_and_null_is_refused():
    assert refused() == dict.fromkeys((ACTOR, ROLLOUT, REFERENCE, CRITIC))


@pytest.mark.parametrize(
    ("changes", "fine"),
    [
        ({"algorithm__use_kl_in_reward": False}, {REFERENCE}),
        ({"actor_rollout_ref__model__lora_rank": 8}, {REFERENCE}),
        ({"actor_rollout_ref__ref__log_prob_use_dynamic_bsz": True}, {REFERENCE}),
        ({"algorithm__adv_estimator": "grpo"}, {CRITIC}),
        ({"critic__enable": False}, {CRITIC}),
        ({"critic__use_dynamic_bsz": True}, {CRITIC}),
        ({"actor_rollout_ref__actor__use_dynamic_bsz": True}, {ACTOR, ROLLOUT}),
        ({"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}, {ACTOR}),
    ],
)
def test_what_is_not_read_may_be_null(changes, fine):
    assert set(refused(**changes)) == {ACTOR, ROLLOUT, REFERENCE, CRITIC} - fine


def test_verls_trainer_before_v1_reads_other_keys():
    assert refused(trainer__use_v1=False) == {}
    assert set(refused(trainer__use_v1=True)) == {ACTOR, ROLLOUT, REFERENCE, CRITIC}


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
def test_only_a_number_of_samples_will_do(value):
    assert refused(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=value)[ACTOR] == value


def test_keys_that_are_not_there_are_not_asked_for():
    assert list(micro_batch_refusals(OmegaConf.create({"algorithm": {"adv_estimator": "gae"}}))) == []


def test_they_are_refused_with_everything_else():
    config = {"actor_rollout_ref": {"actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": None}}}
    with pytest.raises(FuseError, match=r"^2 problems:") as error:
        load_settings(OmegaConf.create(config | {"fuse": {"poll_interval": 0}}))
    assert (
        f"{ACTOR}=null: needs a whole number of samples >= 1, or actor_rollout_ref.actor.use_dynamic_bsz=true"
        in str(error.value)
    )
